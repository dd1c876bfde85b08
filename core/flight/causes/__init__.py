"""Where two runs part, and why: what is known of both, the cause that is named, and what nothing excludes. It may import the flights, which know nothing of it."""
