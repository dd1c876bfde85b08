"""How commands show their results: tables, bars, pictures, durations. Imports nothing of the commands."""
