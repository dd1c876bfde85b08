"""A background reader of leaves that an update may overtake. May import the ground floor of `backends`."""
