"""The modules of this folder are imported as `fuzz.changes` and so on, by its tests and by the processes that they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
