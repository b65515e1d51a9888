"""akv: keeps the KV blocks that an LLM engine computes, and brings them back."""

from __future__ import annotations

from akv.config import Config as Config
from akv.core.align import usable_tokens as usable_tokens
from akv.core.errors import AkvError as AkvError
from akv.core.errors import ConfigError as ConfigError
from akv.core.errors import DeadlineError as DeadlineError
from akv.core.errors import LayoutError as LayoutError
from akv.core.errors import PlanError as PlanError
from akv.core.errors import SessionClosedError as SessionClosedError
from akv.core.errors import StoreCorruptError as StoreCorruptError
from akv.core.errors import StoreError as StoreError
from akv.core.errors import StoreMismatchError as StoreMismatchError
from akv.core.errors import StoreUnavailableError as StoreUnavailableError
from akv.core.errors import WrongThreadError as WrongThreadError
from akv.core.geometry import Geometry as Geometry
from akv.core.geometry import Group as Group
from akv.core.geometry import Region as Region
from akv.core.keys import KeySpace as KeySpace
from akv.core.keys import block_hashes as block_hashes
from akv.core.keys import fingerprint as fingerprint
from akv.core.spec import LoadSpec as LoadSpec
from akv.core.spec import LookupSpec as LookupSpec
from akv.core.spec import SaveSpec as SaveSpec
from akv.core.spec import Span as Span
from akv.device.host import HostDevice as HostDevice
from akv.pipeline.load import LoadOutcome as LoadOutcome
from akv.pipeline.save import SaveOutcome as SaveOutcome
from akv.session import Session as Session
from akv.session import SessionStatistics as SessionStatistics
from akv.session import open_session as open_session

__all__ = (
    "AkvError",
    "Config",
    "ConfigError",
    "DeadlineError",
    "Geometry",
    "Group",
    "HostDevice",
    "KeySpace",
    "LayoutError",
    "LoadOutcome",
    "LoadSpec",
    "LookupSpec",
    "PlanError",
    "Region",
    "SaveOutcome",
    "SaveSpec",
    "Session",
    "SessionClosedError",
    "SessionStatistics",
    "Span",
    "StoreCorruptError",
    "StoreError",
    "StoreMismatchError",
    "StoreUnavailableError",
    "WrongThreadError",
    "block_hashes",
    "fingerprint",
    "open_session",
    "usable_tokens",
)
