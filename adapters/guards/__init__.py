"""What a manager checks beside saving: the first save, a run that was never saved, a rehearsal. May import `live` and what lies below it."""
