"""What a script gave to the run that it attached: settings, schedules, who is trained. May import `loaders`, `components` and what lies between."""
