"""A background reader of leaves that an update may overtake. May import the protocol of `stores` and the ground floor of `backends`."""
