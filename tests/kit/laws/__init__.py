"""What several test files of the laws share."""
