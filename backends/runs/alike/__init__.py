"""What ranks have alike: replicas that are equal, and stages that make one model. May import the rooms that `runs` may, and no other module of `runs`."""
