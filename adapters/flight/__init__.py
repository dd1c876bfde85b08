"""Flight logs of programs: what records their steps, and what runs steps again and compares. May import `live` and what lies below it."""
