"""What a script passed to `attach`: settings, schedules, which parameters are trained. May import `loaders`, `components` and what lies between."""
