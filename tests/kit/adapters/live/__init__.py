"""Runs of tests: jobs with everything that can be attached, loaders of every kind, and hidden state that an audit finds."""
