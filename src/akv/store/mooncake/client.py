"""One client of Mooncake: how it is set up, called and taken down.

Measured with 0.3.13.post1 (two cores, loopback):

- Every call but ``setup`` and ``close`` releases the GIL and may be made from
  several threads at once: no lock is needed round them.
- ``setup`` (50 ms) and ``close`` (1.0 to 1.6 s) hold the GIL. Where the master
  does not answer they hold it longer: a set-up 3 to 4.5 s with one try (90 s
  with Mooncake's own 20), a close three RPC timeouts. So the master is asked
  for a sign of life first, and a client is only closed while there is one.
- A call on a client that was closed crashes the process: see ``link``.
- ``MC_RPC_TIMEOUT_MS`` (30 s) and its kin are read when a client is set up;
  akv sets what the person has not, so that hung calls end sooner.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
from typing import TYPE_CHECKING, Any

from akv.core.errors import AkvError, StoreError, StoreUnavailableError
from akv.store.mooncake.codes import ALREADY_EXISTS
from akv.store.mooncake.prefault import mappings, prefault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.store.mooncake.address import MooncakeAddress
    from akv.store.mooncake.windows import Runs

__all__ = ("Client", "MissingMooncakeError", "import_mooncake", "master_answers")

SIGN_OF_LIFE = 1.0
"""Seconds that a master has for a sign of life."""

_TRANSFER_TIMEOUT = 5
"""Seconds without progress after which a TCP transfer ends (Mooncake: 30).

Where the engine's own memory is used nobody may stop waiting for it earlier.
"""

_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "liburing.so.2": "liburing2",
    "libxxhash.so.0": "libxxhash0",
}


_ours: dict[str, str] = {}
"""The variables that akv has set in this process, not the person."""


class MissingMooncakeError(StoreUnavailableError):
    """Mooncake cannot be imported: what is missing, and how to get it."""


def import_mooncake() -> Any:
    """The module ``mooncake.store``.

    :raises MissingMooncakeError: with the one command that helps
    """
    try:
        import mooncake.store
    except ModuleNotFoundError as error:
        msg = (
            "Mooncake is not installed: pip install mooncake-transfer-engine "
            "(with CUDA) or mooncake-transfer-engine-non-cuda (without)"
        )
        raise MissingMooncakeError(msg) from error
    except ImportError as error:
        raise MissingMooncakeError(_missing_library(str(error))) from error
    return mooncake.store


def _missing_library(reason: str) -> str:
    found = re.match(r"(\S+\.so[.\d]*): cannot open shared object", reason)
    if found is None:
        return f"Mooncake cannot be loaded: {reason}"
    package = _PACKAGES.get(found[1])
    if package is None:
        return f"Mooncake needs the shared library {found[1]}, which is not here"
    return (
        f"Mooncake needs the shared library {found[1]}: "
        f"apt-get install {package} (Debian, Ubuntu)"
    )


def master_answers(host: str, port: int, timeout: float = SIGN_OF_LIFE) -> bool:
    """Whether somebody at that port answers anything, or hangs up, in time.

    Bytes that are no request make a living master hang up; one that is
    stopped, and a port that swallows everything, stay silent.
    """
    try:
        with socket.create_connection((host, port), timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(bytes(64))
            connection.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return True


class Client:
    """A ``MooncakeDistributedStore`` that has been set up. Any thread.

    Whoever calls keeps it from being closed meanwhile; see ``link``.
    """

    def __init__(self, native: Any, *, module: Any, address: MooncakeAddress) -> None:
        self._native = native
        self._module = module
        self._address = address

    @classmethod
    def open(cls, address: MooncakeAddress, *, lend_memory: bool) -> Client:
        """Set up a client; blocks, and keeps the GIL for about 50 ms.

        :param lend_memory: contribute a segment; a client that only looks up
            brings neither segment nor buffer
        :raises StoreUnavailableError: the master does not answer, or refuses
        """
        module = import_mooncake()
        host, port = address.master
        if not master_answers(host, port):
            msg = (
                f"no Mooncake master answers at {address.master_server_address}: "
                f"start mooncake_master there, or name another one"
            )
            raise StoreUnavailableError(msg)
        _set_timeouts(address)
        before = mappings()
        native = module.MooncakeDistributedStore()
        more = (
            {} if address.tenant_id == "default" else {"tenant_id": address.tenant_id}
        )
        code = native.setup(
            address.hostname or _own_address(host, port),
            address.metadata_server,
            address.global_segment_size if lend_memory else 0,
            address.local_buffer_size if lend_memory else 0,
            address.protocol,
            address.device_name,
            address.master_server_address,
            **more,
        )
        if code != 0:
            msg = (
                f"Mooncake could not be set up ({code}) with protocol "
                f"{address.protocol!r}, device {address.device_name!r}, metadata "
                f"{address.metadata_server!r}; its own log on standard error says why"
            )
            raise StoreUnavailableError(msg)
        if lend_memory:
            prefault(before, address.global_segment_size)
        return cls(native, module=module, address=address)

    @property
    def hostname(self) -> str:
        """The name under which the pool knows this client's segment."""
        return str(self._call(self._native.get_hostname))

    def placement(self, *, pinned: bool = False, segment: str = "") -> Any:
        """Where and how an object is to be kept.

        :param pinned: never evict it; in three places, if there are as many
        """
        config = self._module.ReplicateConfig()
        config.preferred_segment = segment or self._address.preferred_segment
        if pinned:
            config.with_hard_pin = True
            config.replica_num = 3
        return config

    def register_buffer(self, address: int, size: int) -> int:
        """Make memory known; a code."""
        return int(self._call(self._native.register_buffer, address, size))

    def unregister_buffer(self, address: int) -> int:
        """Forget memory; a code."""
        return int(self._call(self._native.unregister_buffer, address))

    def exist(self, keys: Sequence[str]) -> list[int]:
        """1, 0 or a code for each key; what is there gets a lease."""
        return self._many(self._native.batch_is_exist, keys)

    def look(self, keys: Sequence[str]) -> list[int]:
        """0 or a code for each key: unlike ``exist``, -703 where it is unfinished."""
        codes = self._many(self._native.batch_get_session_start, keys)
        self._call(self._native.batch_get_session_end, list(keys))
        return codes

    def get(self, keys: Sequence[str], places: Sequence[Runs]) -> list[int]:
        """The bytes that came, or a code, for each key; keys differ."""
        native = self._native
        return self._move(
            native.batch_get_into, native.batch_get_into_multi_buffers, keys, places
        )

    def put(self, keys: Sequence[str], places: Sequence[Runs]) -> list[int]:
        """0 or a code for each key; 0 also for a key that is there already."""
        native = self._native
        return self._move(
            native.batch_put_from,
            native.batch_put_from_multi_buffers,
            keys,
            places,
            self.placement(),
        )

    def _move(
        self,
        one_run: Callable[..., Any],
        any_runs: Callable[..., Any],
        keys: Sequence[str],
        places: Sequence[Runs],
        *more: Any,
    ) -> list[int]:
        """Move objects of one run each with ``one_run``, which is quicker."""
        if all(len(runs) == 1 for runs in places):
            flat = [run for (run,) in places]
            addresses = [address for address, _ in flat]
            return self._many(
                one_run, keys, addresses, [size for _, size in flat], *more
            )
        return self._many(
            any_runs,
            keys,
            [[address for address, _ in runs] for runs in places],
            [[size for _, size in runs] for runs in places],
            *more,
        )

    def create(self, key: str, address: int, size: int, placement: Any) -> int:
        """0 if this call made the object; -705 if anybody has, or has begun to."""
        (code,) = self._many(
            self._native.batch_put_session_start, [key], [size], placement
        )
        if code != 0:
            if code != ALREADY_EXISTS:
                # Begun all the same, perhaps: else no later start would succeed.
                self._call(self._native.batch_put_session_revoke, [key])
            return code
        (code,) = self._many(
            self._native.batch_put_from_multi_buffer_ranges,
            [key],
            [[address]],
            [[size]],
            [[0]],
        )
        if code == size:
            (code,) = self._many(self._native.batch_put_session_end, [key])
        if code < 0:
            self._call(self._native.batch_put_session_revoke, [key])
        return code

    def remove(self, keys: Sequence[str], *, force: bool) -> list[int]:
        """0 or a code for each key; ``force`` ignores leases and pins."""
        return self._many(self._native.batch_remove, keys, force)

    def remove_matching(self, pattern: str, *, force: bool) -> int:
        """How many objects were removed, or a code; scans all keys of the pool."""
        return int(self._call(self._native.remove_by_regex, pattern, force))

    def close(self) -> None:
        """Take it down: holds the GIL for a second or two.

        Ends every transfer that may still touch registered memory, and takes
        the segment out of the pool.
        """
        self._call(self._native.close)

    def abandon(self) -> None:
        """Never take it down: its master is silent, and closing would hang.

        Mooncake tries once more when the process ends.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._native))

    def _many(
        self, call: Callable[..., Any], keys: Sequence[str], *more: Any
    ) -> list[int]:
        codes = [int(code) for code in self._call(call, list(keys), *more)]
        if len(codes) != len(keys):
            msg = f"Mooncake answered {len(codes)} times for {len(keys)} keys"
            raise StoreError(msg)
        return codes

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except AkvError:
            raise
        except Exception as error:
            msg = f"Mooncake raised {type(error).__name__}: {error}"
            raise StoreError(msg) from error


def _set_timeouts(address: MooncakeAddress) -> None:
    """Say what the person has not said: calls shall end, and soon.

    Mooncake reads these when it is set up, and only from the environment.
    """
    milliseconds = str(int(address.rpc_timeout * 1000))
    for name, value in (
        ("MC_RPC_TIMEOUT_MS", milliseconds),
        ("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds),
        ("MC_STORE_CLIENT_SETUP_RETRIES", "1"),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", str(_TRANSFER_TIMEOUT)),
        ("MC_TCP_STATUS_TIMEOUT_SEC", str(_TRANSFER_TIMEOUT)),
    ):
        if os.environ.get(name) in (None, _ours.get(name)):
            os.environ[name] = _ours[name] = value


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to the master; sends nothing."""
    try:
        family, kind, *_, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        msg = f"no way to {host}: {error}; name this machine with hostname="
        raise StoreUnavailableError(msg) from error
