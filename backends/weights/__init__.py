"""Sources of weights: other runs, directories of model hubs, the first rank. Each yields one tensor after the other. May import every other room of `backends`."""
