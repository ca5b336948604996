"""What every memory backend keeps: bytes belong to whoever holds descriptors, and cannot change."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import Backend  # placeholder
