"""What several test files share: programs, loaders, models. One package for each folder of tests, such as `kit.core.step_cases`."""
