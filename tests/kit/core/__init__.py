"""What several test files of `core` share."""
