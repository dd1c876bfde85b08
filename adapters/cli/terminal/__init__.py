"""What commands show, and how: tables, bars, pictures, durations. Imports nothing of the commands."""
