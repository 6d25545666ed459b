"""The commands' code under the name that it is installed by: in a checkout it lies in the folder `scripts`."""

from pathlib import Path

__path__ = [str(Path(__file__).with_name("scripts"))]
