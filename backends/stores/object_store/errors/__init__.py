"""What may be said of the errors of an object store's client, by which names, and what to do. May import the ground of stores."""
