"""NCCL as far as we need it, called directly: communicators, and what is queued on them.

`ProcessGroupNCCL` brings a watchdog that ends the process, streams of its own, and no way to
abort a connection that is being made. Here every operation goes to the current CUDA stream, and a
communicator can be aborted at any moment, from any thread: communicators are made non-blocking,
so a call that is not complete says so, and we look again until it is or until it is aborted.

Facts about the interface are those of NCCL's public header (2.18 and later keep them): result
codes, types, and that a configuration says its own size and version.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from resihp.errors import CommError
from resihp.executor.flat import split_flat

__all__ = ["Abortable", "NcclCommunicator", "abort_all", "load_nccl", "new_unique_id"]

_SUCCESS, _IN_PROGRESS = 0, 7
_UNIQUE_ID_BYTES = 128
_SUM = 0
_BYTE = 1
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_CONFIG_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21800
_UNDEFINED = -(2**31)
_LOOK_S = 0.0002
_NAMES = ("libnccl.so.2", "libnccl.so")
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """`ncclConfig_t` as of 2.18; later versions read what an older one says."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


_PEER_TO_PEER = (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER)
"""Buffer, count, type, peer, communicator, stream."""
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(_POINTER),
        _INT,
        _UniqueId,
        _INT,
        ctypes.POINTER(_Config),
    ),
    "ncclCommGetAsyncError": (_POINTER, ctypes.POINTER(_INT)),
    "ncclCommAbort": (_POINTER,),
    "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ncclSend": _PEER_TO_PEER,
    "ncclRecv": _PEER_TO_PEER,
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


@lru_cache(maxsize=1)
def load_nccl() -> Any:
    """The library that torch itself uses, with typed functions; CommError where there is none."""
    library: Any = None
    for name in _NAMES:
        try:
            library = ctypes.CDLL(name)  # torch with CUDA has loaded it already
            break
        except OSError:
            continue
    if library is None:
        raise CommError(f"no NCCL: none of {', '.join(_NAMES)} can be loaded")
    library.ncclGetErrorString.argtypes = (ctypes.c_int,)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


def new_unique_id() -> bytes:
    """What all members of one new communicator must know; made by one of them."""
    unique = _UniqueId()
    _check(load_nccl().ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
    return bytes(unique)


def _check(code: int, what: str) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        reason = load_nccl().ncclGetErrorString(code).decode()
        raise CommError(f"{what}: {reason}")


class Abortable(Protocol):
    """What of a communicator ends it. Thread-safe."""

    def refuse(self) -> None:
        """Queue nothing from now on; what is pending runs on."""
        ...

    def abort(self) -> None:
        """End what is pending, which may take long."""
        ...


def abort_all(communicators: Sequence[Abortable]) -> list[threading.Thread]:
    """Abort on threads of their own, which are returned: NCCL waits for its kernels to end.

    First all refuse more: what an abort breaks off leaves garbage behind, and no other communicator
    may carry that to its members, least of all the vote's.
    """
    for communicator in communicators:
        communicator.refuse()
    threads = [threading.Thread(target=each.abort, daemon=True) for each in communicators]
    for thread in threads:
        thread.start()
    return threads


class NcclCommunicator:
    """A group on NCCL (see `interface.Communicator`): every method queues on the current stream.

    The current device must be the one that it was made on. All members make and `connect` their
    communicators in one order. CommError where something is not complete within `timeout_s`, and
    from every method after `abort`.
    """

    def __init__(
        self,
        unique_id: bytes,
        ranks: Sequence[int],
        index: int,
        *,
        timeout_s: float,
        max_ctas: int | None = None,
    ) -> None:
        """`max_ctas` bounds the multiprocessors of one operation; None: as many as NCCL likes."""
        self.ranks = tuple(ranks)
        self.index = index
        self._refuses = threading.Event()
        self._aborted = False
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._nccl = load_nccl()
        self._comm = ctypes.c_void_p()
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_CONFIG_MAGIC,
            version=_CONFIG_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED if max_ctas is None else max_ctas,
            net_name=None,
            split_share=_UNDEFINED,
        )
        unique = _UniqueId.from_buffer_copy(unique_id)
        code = self._nccl.ncclCommInitRankConfig(
            ctypes.byref(self._comm), len(self.ranks), unique, index, ctypes.byref(config)
        )
        _check(code, f"ncclCommInitRankConfig over ranks {list(self.ranks)}")

    def connect(self) -> None:
        """Block until all members have come."""
        self._settle(_IN_PROGRESS, "connecting")

    @property
    def degree(self) -> int:
        """Number of members."""
        return len(self.ranks)

    # --- collectives

    def all_reduce_(self, tensor: Tensor) -> None:
        """See `Communicator`."""
        assert tensor.is_contiguous()
        at = tensor.data_ptr()
        self._queue(
            "ncclAllReduce",
            lambda stream: self._nccl.ncclAllReduce(
                at, at, tensor.numel(), _TYPES[tensor.dtype], _SUM, self._comm, stream
            ),
        )

    def all_gather(self, part: Tensor) -> Tensor:
        """See `Communicator`."""
        source = part.contiguous()
        out = source.new_empty((self.degree, *source.shape))
        self._queue(
            "ncclAllGather",
            lambda stream: self._nccl.ncclAllGather(
                source.data_ptr(),
                out.data_ptr(),
                source.numel(),
                _TYPES[source.dtype],
                self._comm,
                stream,
            ),
        )
        return out

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See `Communicator`."""
        sources = [part.contiguous() for part in parts]
        out = split_flat(sources[0].new_empty(sum(sizes)), sizes)
        out[self.index].copy_(sources[self.index])
        others = [member for member in range(self.degree) if member != self.index]

        def exchange(stream: int) -> int:
            code = self._nccl.ncclGroupStart()
            for member in others:
                if sources[member].numel():
                    code = code or self._send(sources[member], member, stream)
                if out[member].numel():
                    code = code or self._receive(out[member], member, stream)
            ended: int = self._nccl.ncclGroupEnd()  # also after an error, or the thread stays in it
            return code or ended

        self._queue("all-to-all", exchange)
        return out

    # --- point to point, between the two members of an edge

    def send(self, tensor: Tensor, member: int) -> None:
        """Queue the bytes of a contiguous tensor for `member`."""
        assert tensor.is_contiguous()
        self._queue("ncclSend", lambda stream: self._send(tensor, member, stream))

    def receive_(self, buffer: Tensor, member: int) -> None:
        """Queue the filling of `buffer` by what `member` sends."""
        assert buffer.is_contiguous()
        self._queue("ncclRecv", lambda stream: self._receive(buffer, member, stream))

    def _send(self, tensor: Tensor, member: int, stream: int) -> int:
        size = tensor.numel() * tensor.element_size()
        code: int = self._nccl.ncclSend(tensor.data_ptr(), size, _BYTE, member, self._comm, stream)
        return 0 if code == _IN_PROGRESS else code

    def _receive(self, buffer: Tensor, member: int, stream: int) -> int:
        size = buffer.numel() * buffer.element_size()
        code: int = self._nccl.ncclRecv(buffer.data_ptr(), size, _BYTE, member, self._comm, stream)
        return 0 if code == _IN_PROGRESS else code

    # --- the life of the communicator

    def _queue(self, what: str, start: Callable[[int], int]) -> None:
        stream: int = torch.cuda.current_stream().cuda_stream
        with self._lock:
            if self._refuses.is_set():
                raise CommError(f"{what} over ranks {list(self.ranks)}: aborted")
            code = start(stream)
        self._settle(code, what)

    def _settle(self, code: int, what: str) -> None:
        """Wait until the call is complete on the host: it queues, the device may be far behind."""
        where = f"{what} over ranks {list(self.ranks)}"
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            _check(code, where)
            with self._lock:
                if self._refuses.is_set():
                    raise CommError(f"{where}: aborted")
                state = ctypes.c_int(_SUCCESS)
                _check(
                    self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state)),
                    "ncclCommGetAsyncError",
                )
            code = state.value
            if code == _SUCCESS:
                return
            if time.monotonic() > deadline_s:
                self.abort()
                raise CommError(f"{where}: not complete within {self._timeout_s} s")
            time.sleep(_LOOK_S)

    def refuse(self) -> None:
        """See `Abortable`."""
        self._refuses.set()

    def abort(self) -> None:
        """See `Abortable`. Of the device too; then the communicator is gone."""
        self.refuse()
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            if self._comm:
                self._nccl.ncclCommAbort(self._comm)
