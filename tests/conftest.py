"""Helpers beside the tests are plain modules: `from workloads import fresh_case`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
