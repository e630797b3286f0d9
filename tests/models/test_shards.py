"""What is known of a model whose weights are spread over ranks, in one process."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

from torch import nn

from theodolite.models import shards


class _Flat(nn.Module):
    """As FSDP1 is: it holds the module whose parameters lie in its flat one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        infos = [SimpleNamespace(module=inner)]
        self._handle = SimpleNamespace(flat_param=SimpleNamespace(_param_infos=infos, _shared_param_infos=[]))


def test_a_sharded_model_is_not_kept_by_what_is_known_of_it(monkeypatch):
    monkeypatch.setattr(shards, "FullyShardedDataParallel", _Flat)
    monkeypatch.setattr(shards.distributed, "is_initialized", lambda: True)
    owner = _Flat(nn.Linear(2, 2))
    shards.register_spread(owner)
    assert shards.flat_owner(owner.inner) is owner
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
