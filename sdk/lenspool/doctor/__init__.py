"""What is wrong with a setup, and what to do: `lenspool doctor`.

Each check looks at one thing and returns findings. A check never raises, and waits seconds at most.
"""

from lenspool.doctor.finding import Finding
from lenspool.doctor.visit import examine

__all__ = ["Finding", "examine"]
