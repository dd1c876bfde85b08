"""How deep a run of the tests looks: a usual run takes one case where further cases are alike, and `make laws` takes all of them."""

import os

IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak")
