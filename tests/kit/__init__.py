"""What several test files of one subject share: programs, loaders, models. Imported as `kit.<subject>_cases`."""
