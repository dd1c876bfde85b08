"""Managers of tests: jobs that save, async saves, requests, flight logs and replays."""
