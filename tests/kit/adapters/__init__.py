"""What several test files of `adapters` share."""
