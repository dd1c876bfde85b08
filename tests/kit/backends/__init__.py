"""What several test files of `backends` share."""
