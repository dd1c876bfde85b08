"""What several test files of whole programs share."""
