"""Helpers beside the tests are plain modules: `from workloads import fresh_case`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from hypothesis import settings

# On a shared machine a slow example says nothing about the code.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
