"""Effects: where bytes, ranks and time are; interpreters of the plans of `core`, which decide nothing. May import `core` alone."""
