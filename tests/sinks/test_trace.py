"""The trace against an independent one that keeps every matrix; planted sinks; streaming; what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from tests import checkpoints, planted
from tests.calls import same_bytes
from tests.slow import slow_but
from theodolite.errors import WorkError
from theodolite.models import open_model
from theodolite.passes.run import Run
from theodolite.sinks.trace import trace_sinks

CONTEXTS, LENGTH, HEADS, LAYERS = 6, 24, 4, 3
LEARNED = -1


@dataclass
class Kept:
    """Everything of a small model on a few contexts, from its own eager attention; float64."""

    hidden: np.ndarray  # (layers + 1, C, T, d), before any final norm
    attention: np.ndarray  # (L, C, H, T, T)
    visible: np.ndarray  # (L, T, T)
    value: np.ndarray  # (L, C, H, T, w)
    w_o: np.ndarray  # (L, H, w, d)
    learned: bool


BLOOM, BERT = "transformer.h.{}.self_attention", "bert.encoder.layer.{}.attention"
LAYOUT: dict[str, tuple[str, str, str | None]] = {
    # what gives the values, what holds W_O, the final norm
    "gpt2": ("transformer.h.{}.attn.c_attn", "transformer.h.{}.attn.c_proj", "transformer.ln_f"),
    "bloom": (f"{BLOOM}.query_key_value", f"{BLOOM}.dense", "transformer.ln_f"),
    "bert": (f"{BERT}.self.value", f"{BERT}.output.dense", None),
    "modernbert": ("model.layers.{}.attn.Wqkv", "model.layers.{}.attn.Wo", "model.final_norm"),
}
DEFAULT_LAYOUT = ("model.layers.{}.self_attn.v_proj", "model.layers.{}.self_attn.o_proj", "model.norm")


def _values(family: str, output: torch.Tensor) -> torch.Tensor:
    """(C, H, T, w) from what leaves the projection."""
    contexts, length, _ = output.shape
    if family in ("gpt2", "modernbert", "bert"):
        found = output[..., -32:].view(contexts, length, HEADS, 8)
    elif family == "bloom":
        found = output.view(contexts, length, HEADS, 3, 8)[..., 2, :]
    else:
        width = 12 if family in ("gemma2", "gpt_oss") else 8
        found = output.view(contexts, length, -1, width)
        found = found.repeat_interleave(HEADS // found.shape[2], dim=2)
    return found.transpose(1, 2)


def _visible(config: Any, layer: int, length: int) -> np.ndarray:
    query, key = np.arange(length)[:, None], np.arange(length)
    kinds = getattr(config, "layer_types", None)
    local = kinds[layer] == "sliding_attention" if kinds else config.model_type == "mistral"
    if config.model_type == "modernbert":
        return np.abs(query - key) <= config.local_attention // 2 if local else key <= query + length
    seen = key <= query + (length if config.model_type == "bert" else 0)
    return seen & (key > query - config.sliding_window) if local else seen


def keep(family: str, hf: Any, ids: torch.Tensor) -> Kept:
    """Run eagerly and keep everything. In a float64 model the softmax is float64 too."""
    hf.set_attn_implementation("eager")
    value_name, output_name, norm_name = LAYOUT.get(family, DEFAULT_LAYOUT)
    values: list[torch.Tensor] = []
    last: list[torch.Tensor] = []
    hooks = [
        hf.get_submodule(value_name.format(layer)).register_forward_hook(
            lambda _, args, output: values.append(_values(family, output))
        )
        for layer in range(LAYERS)
    ]
    if norm_name:
        norm = hf.get_submodule(norm_name)
        hooks.append(norm.register_forward_pre_hook(lambda _, args: last.append(args[0])))
    true_softmax = F.softmax
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        # Llama's eager attention and others' take it in float32, whatever the model's dtype.
        patch.setattr(F, "softmax", lambda x, dim=-1, dtype=None: true_softmax(x, dim=dim))
        done = hf(input_ids=ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    hidden = [*done.hidden_states[:-1], last[0] if last else done.hidden_states[-1]]
    weights = [hf.get_submodule(output_name.format(layer)).weight for layer in range(LAYERS)]
    w_o = [(w if family == "gpt2" else w.T).detach().double().numpy() for w in weights]
    return Kept(
        hidden=np.stack([h.double().numpy() for h in hidden]),
        attention=np.stack([a.double().numpy() for a in done.attentions]),
        visible=np.stack([_visible(hf.config, layer, ids.shape[1]) for layer in range(LAYERS)]),
        value=np.stack([v.double().numpy() for v in values]),
        w_o=np.stack([w.reshape(HEADS, -1, w.shape[-1]) for w in w_o]),
        learned=family == "gpt_oss",
    )


def sums_of_squares(x: np.ndarray, group: np.ndarray) -> tuple[float, float]:
    """Between groups, and in total, by definition; zeros where there are not two groups."""
    names = np.unique(group)
    if len(names) < 2:
        return 0.0, 0.0
    mean = x.mean(0)
    between = sum((group == g).sum() * ((x[group == g].mean(0) - mean) ** 2).sum() for g in names)
    return float(between), float(((x - mean) ** 2).sum())


Pairs = dict[int, tuple[float, float]]


def ratios(pairs: Pairs, contexts: int) -> np.ndarray:
    """Σb/Σt over contexts, then without each of eight groups of neighbours; NaN of fewer contexts."""
    of_context = np.array(list(pairs.values()), dtype=float)
    group = np.array(list(pairs)) * 8 // contexts
    sums = np.array([of_context[group != left_out].sum(0) for left_out in range(-1, 8)])
    with np.errstate(invalid="ignore"):
        values = sums[:, 0] / sums[:, 1]
    values[1:] += 0 if contexts >= 8 else math.nan
    return values


def with_error(values: np.ndarray) -> tuple[float, float]:
    """A number and its jackknife error."""
    return values[0], math.sqrt(7 / 8 * ((values[1:] - values[1:].mean()) ** 2).sum())


def catch(kept, layer, context, head, local_sinks=False):
    """Sinks with what they receive, which of them are local, which queries count, and who caught each (−2: none)."""
    p, seen = kept.attention[layer, context, head], kept.visible[layer]
    length = len(p)
    received = p.sum(0) / np.maximum(seen.sum(0), 1)
    eligible = seen.sum(0) - 1 >= min(16, math.ceil(length / 4))
    assert np.abs(received - 0.3).min() > 1e-6, "too near the threshold to compare"
    sinks = {int(k): float(received[k]) for k in np.flatnonzero((received > 0.3) & eligible)}
    local: set[int] = set()
    if local_sinks:
        caught_by = [int(row.argmax()) for row in p]
        for key in range(length):
            queries = [q for q in range(length) if caught_by[q] == key != q and p[q, key] > 0.3]
            if len(queries) >= min(16, math.ceil(length / 4)) and key not in sinks:
                local.add(key)
        sinks = {key: float(received[key]) for key in sorted({*sinks, *local})}
    columns = dict(enumerate(p.T))
    if kept.learned:
        columns[LEARNED] = 1 - p.sum(1)
        if columns[LEARNED].mean() > 0.3:
            sinks[LEARNED] = float(columns[LEARNED].mean())
    counts = np.array([i > 0 and i not in sinks for i in range(length)])
    caught = np.full(length, -2)
    for i in np.flatnonzero(counts):
        best = max(sinks, key=lambda s: columns[s][i], default=None)
        if best is not None:
            assert abs(columns[best][i] - 0.3) > 1e-6, "too near the threshold to compare"
            caught[i] = best if columns[best][i] > 0.3 else -2
    return sinks, local, counts, caught


def expected(kept, ids, local_sinks=False):
    """Rows of `traces` by (layer, head, kind, token) and of `heads` by (layer, head), arrays included."""
    layers, contexts, heads, length, _ = kept.attention.shape
    traces: dict[tuple, dict[str, Any]] = {}
    by_head: dict[tuple, dict[str, Any]] = {}
    for layer, context, head in np.ndindex(layers, contexts, heads):
        sinks, local, counts, caught = catch(kept, layer, context, head, local_sinks)
        if not sinks:
            continue
        p, v = kept.attention[layer, context, head], kept.value[layer, context, head]
        output = p @ v @ kept.w_o[layer, head]
        written = v @ kept.w_o[layer, head]
        places = {-1: output, **{r: kept.hidden[r, context] for r in range(layer, layers + 1)}}
        groups = caught[counts]
        row = by_head.setdefault(
            (layer, head), {"contexts": 0, "moment": 0, "pairs": {}, "chance": {}, "shifted": 0.0}
        )
        row["contexts"] += 1
        centred = output[counts] - output[counts].mean(0)
        row["moment"] = row["moment"] + centred.T @ centred
        for fifth in range(1, 5):  # a pair of 0 and 0 where there are no two groups
            row["shifted"] += (
                sums_of_squares(output[counts], np.roll(groups, -(len(groups) * fifth // 5)))[0] / 4
            )
        for place, x in places.items():
            b, t = sums_of_squares(x[counts], groups)
            row["pairs"].setdefault(place, {})[context] = (b, t)
            share = (len(np.unique(groups)) - 1) / max(counts.sum() - 1, 1)
            row["chance"][place] = row["chance"].get(place, 0) + t * share
        for sink, received in sinks.items():
            later = "local" if sink in local else "later"
            kind = {0: "first", LEARNED: "learned"}.get(sink, later)
            key = (layer, head, kind, int(ids[context, sink]) if kind in ("later", "local") else -1)
            row = traces.setdefault(key, {"of": {}, "found": [], "chance": {}, "shifted": 0.0})
            own = caught[counts] == sink
            for fifth in range(1, 5):
                moved = np.roll(own, -(len(own) * fifth // 5))
                row["shifted"] += sums_of_squares(output[counts], moved)[0] / 4
            for place, x in places.items():
                b, t = sums_of_squares(x[counts], own)
                pairs = row["of"].setdefault(place, {})
                before = pairs.get(context, (0, 0))
                pairs[context] = (before[0] + b, before[1] + t)
                row["chance"][place] = row["chance"].get(place, 0) + t / max(counts.sum() - 1, 1)
            n, n1 = counts.sum(), own.sum()
            x = output[counts]
            difference = x[own].mean(0) - x[~own].mean(0) if 0 < n1 < n else np.zeros(x.shape[1])
            row["found"].append(
                {
                    "context": context,
                    "position": sink,
                    "received": received,
                    "caught": n1,
                    "weight": n1 * (n - n1) / n if n else 0,
                    "difference": difference,
                    "value": written[sink] if sink >= 0 else np.zeros(x.shape[1]),
                    "others": np.linalg.norm(written[counts], axis=1).mean() if n else 0,
                }
            )
    return (
        {key: _trace_row(row, key[0], layers, contexts, length) for key, row in traces.items()},
        {key: _head_row(row, key[0], layers, contexts) for key, row in by_head.items()},
    )


def _release(of, layer, layers, contexts, sums, shifted):
    """Columns and arrays of η² at the head's output (place −1) and in the stream.

    `sums`: of squares that a random grouping explains, by place; `shifted`: one shifted along the context.
    """
    tag, tag_se = with_error(ratios(of[-1], contexts))
    totals = {place: sum(t for _, t in pairs.values()) for place, pairs in of.items()}
    chance = {place: sums[place] / total if total else math.nan for place, total in totals.items()}
    stream = np.full((layers + 1, 2), math.nan)
    for place in range(layer, layers + 1):
        stream[place] = with_error(ratios(of[place], contexts))
    after = stream[layer + 1 :, 0]
    best = layer + 1 + (0 if np.isnan(after).all() else int(np.nanargmax(after)))
    gain, gain_se = with_error(ratios(of[best], contexts) - ratios(of[layer], contexts))
    return {
        "tag_chance": chance[-1],
        "tag_shifted": shifted / totals[-1] if totals[-1] else math.nan,
        "gain": gain,
        "gain_se": gain_se,
        "tag": tag,
        "tag_se": tag_se,
        "before": stream[layer, 0],
        "after": stream[layer + 1, 0],
        "released": stream[best, 0],
        "released_se": stream[best, 1],
        "released_layer": -1 if np.isnan(stream[best, 0]) else best,
        "release": stream[:, 0],
    }


def _trace_row(row: dict[str, Any], layer: int, layers: int, contexts: int, length: int) -> dict[str, Any]:
    found = pd.DataFrame([{k: v for k, v in f.items() if np.ndim(v) == 0} for f in row["found"]])
    weight, caught = found.weight.to_numpy(), found.caught.to_numpy()
    width = len(row["found"][0]["value"])
    direction = np.full(width, math.nan)
    if weight.sum():
        direction = np.sum([f["weight"] * f["difference"] for f in row["found"]], axis=0) / weight.sum()
    value = np.sum([f["caught"] * f["value"] for f in row["found"]], axis=0) / max(caught.sum(), 1)
    own = sum(f["caught"] * np.linalg.norm(f["value"]) for f in row["found"])
    others = sum(f["caught"] * f["others"] for f in row["found"])
    product = np.linalg.norm(direction) * np.linalg.norm(value)
    size = np.abs(np.nan_to_num(direction))
    order = np.argsort(-size, kind="stable")[:5]
    limit = 6 / 0.6745 * np.sort(size)[(width - 1) // 2]
    columns = {
        "contexts": found.context.nunique(),
        "share": found.context.nunique() / contexts,
        "position": found.position.mean(),
        "received": found.received.mean(),
        "caught": caught.sum() / (contexts * (length - 1)),
        "alignment": direction @ value / product if product > 0 else math.nan,
        "value_ratio": own / others if others else math.nan,
        "dimension": order[0] if size.any() else -1,
        "outlier_dimensions": " ".join(str(d) for d in order if size[d] > limit),
        "tag_direction": direction,
        **_release(row["of"], layer, layers, contexts, row["chance"], row["shifted"]),
    }
    return columns | {"tagged": columns["caught"] * columns["tag"]}


def _head_row(row: dict[str, Any], layer: int, layers: int, contexts: int) -> dict[str, Any]:
    vectors = np.linalg.eigh(row["moment"])[1]
    released = _release(row["pairs"], layer, layers, contexts, row["chance"], row["shifted"])
    return {
        "contexts": row["contexts"],
        "share": row["contexts"] / contexts,
        "principal_direction": vectors[:, -1],
        **{name: value for name, value in released.items() if name != "release"},
    }


# Family → by how much its queries are longer than those of tests/checkpoints.py, so that there are sinks.
STRENGTH = {"gpt2": 14.0, "bert": 4.0, "bloom": 2.0, "llama3": 4.0, "mistral": 8.0, "gemma2": 2.0}
STRENGTH |= {"gpt_oss": 1.0, "modernbert": 6.0}
MODERNBERT = {
    **checkpoints.FAMILIES["bert"][2],
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
    "local_attention": 14,
    "global_attn_every_n_layers": 3,
}


CASES = [
    ("gpt2", "float64", {"first", "later", "local"}),
    ("gpt_oss", "float32", {"learned", "later"}),
    ("bert", "float64", {"first", "later", "local"}),
    ("bloom", "float64", {"first", "later"}),
    ("llama3", "float64", {"first", "later"}),
    ("llama3", "float32", {"first", "later"}),
    ("mistral", "float64", {"first", "later"}),
    ("gemma2", "float64", {"first", "later"}),
    ("gpt_oss", "float32", {"first", "learned", "later", "local"}),
    ("modernbert", "float64", {"first", "later"}),
]


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory):
    """strong(family) → the folder of a tiny random model that has sinks."""

    def folder(family: str) -> Path:
        path = Path(tmp_path_factory.getbasetemp()) / "strong" / family
        if path.exists():
            return path
        with pytest.MonkeyPatch.context() as patch:
            named = ("ModernBertForMaskedLM", "ModernBertConfig", MODERNBERT)
            patch.setitem(checkpoints.FAMILIES, "modernbert", named)
            model = checkpoints.build(family)
        queries = ("q_proj.weight", "query.weight", "query_key_value.weight")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "c_attn.weight" in name:
                    parameter[:, :32] *= STRENGTH[family]
                elif "Wqkv.weight" in name:
                    parameter[:32] *= STRENGTH[family]
                elif name.endswith(queries):
                    parameter *= STRENGTH[family]
                elif name.endswith("sinks"):
                    parameter += torch.tensor([4.0, 0.0, 3.0, -2.0])
        model.save_pretrained(path)
        return path

    return folder


def some_ids(contexts: int = CONTEXTS, seed: int = 1) -> torch.Tensor:
    """Of a small vocabulary, so that a token is a sink more than once in a context."""
    return torch.randint(12, (contexts, LENGTH), generator=torch.Generator().manual_seed(seed))


def _close(got: Any, expected: Any, tolerance: float, what: Any) -> None:
    scale = np.nanmax(np.abs(expected), initial=1e-3) if np.ndim(expected) else max(abs(expected), 1e-3)
    if np.isnan(scale):
        scale = 1.0
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * scale, err_msg=str(what))


@pytest.mark.parametrize(("family", "dtype", "kinds"), slow_but(CASES[:2], CASES))
def test_every_column_and_array_equals_the_dense_computation(family, dtype, kinds, strong):
    ids = some_ids()
    model = open_model(strong(family), dtype=dtype)
    run = trace_sinks(model, ids, local_sinks="local" in kinds, batch=4)
    reference = type(model.hf).from_pretrained(strong(family), dtype=getattr(torch, dtype)).eval()
    traces, heads = expected(keep(family, reference, ids), ids.numpy(), "local" in kinds)
    assert set(run.traces.kind) == kinds
    keys = list(zip(run.traces.layer, run.traces["head"], run.traces.kind, run.traces.token_id, strict=True))
    assert sorted(keys) == sorted(traces)
    assert [(row.layer, row.head) for row in run.heads.itertuples()] == sorted(heads)
    # Directions are kept in float32.
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    rows = [(run.traces, traces, keys), (run.heads, heads, sorted(heads))]
    for table, by_key, order in rows:
        for number, key in enumerate(order):
            for name, value in by_key[key].items():
                got = run.arrays[name][number].numpy() if name in run.arrays else table[name][number]
                if isinstance(value, str):
                    assert got == value, (key, name)
                    continue
                if name == "principal_direction":
                    got = got * np.sign(got @ value)
                direction = name.endswith("_direction")
                _close(got, value, max(tolerance, 1e-6) if direction else tolerance, (key, name))
    own = set(run.traces) - {"layer", "head", "kind", "token_id", "token"}
    arrays = {"tag_direction", "release"}
    if len(ids) >= 8:  # the sums by group have the direction of all
        whole = run.arrays["tag_by_group"].double().sum(dim=1)
        known = torch.isfinite(run.arrays["tag_direction"][: len(whole)]).all(dim=1)
        alike = torch.cosine_similarity(whole, run.arrays["tag_direction"][: len(whole)].double())
        assert (alike[known] > 1 - 1e-6).all()
    assert own | arrays == set(next(iter(traces.values())))
    assert run.traces.tagged.dropna().is_monotonic_decreasing


@pytest.fixture(scope="module")
def planted_run(tmp_path_factory: pytest.TempPathFactory):
    """planted_run(family, ids, dtype) → the trace of a planted checkpoint."""

    def trace(family: str, ids: torch.Tensor, dtype: str = "float64", **options: Any) -> Run:
        folder = Path(tmp_path_factory.getbasetemp()) / "planted" / family
        if not folder.exists():
            planted.write(family, folder)
        return trace_sinks(open_model(folder, dtype=dtype), ids, **options)

    return trace


def _planted_keys() -> list[tuple[int, int, str, int]]:
    token = {planted.IS_S1: ("later", planted.S1), planted.IS_S2: ("later", planted.S2)}
    return [(layer, head, *token.get(marker, ("first", -1))) for layer, head, marker, _ in planted.SINKS]


def _keys(run: Run) -> list[tuple[int, int, str, int]]:
    return [(row.layer, row.head, row.kind, row.token_id) for row in run.traces.itertuples()]


@pytest.mark.parametrize("family", slow_but(["llama"], ["gpt2", "llama"]))
def test_planted_sinks_are_found_and_nothing_else(family, planted_run):
    """Oracle: where they were planted, and what was planted there."""
    ids = planted.contexts(8)
    run = planted_run(family, ids)
    assert sorted(_keys(run)) == sorted(_planted_keys())
    assert (run.traces.share == 1).all()
    rows = [_keys(run).index(key) for key in _planted_keys()]
    table, directions = run.traces.iloc[rows].reset_index(drop=True), run.arrays["tag_direction"][rows]
    cosine = torch.stack(
        [torch.cosine_similarity(d.double(), planted.tag(n), 0) for n, d in enumerate(directions)]
    )
    # Alone, a sink's tag is what it writes. Beside another, what the others got is in part the other's tag.
    assert cosine[0] > 0.999
    assert table.alignment[0] > 0.999
    np.testing.assert_allclose(table.alignment, cosine, atol=2e-3)
    assert (cosine > 0.8).all()
    assert table.dimension[0] == planted.OUTLIER
    assert table.outlier_dimensions.tolist() == [str(planted.OUTLIER), "", "", "", ""]
    # A third each is caught, but for tokens that stand before their sink.
    assert table.caught.between(0.29, 0.48).all()
    release = run.arrays["release"][rows]
    assert release[0, 1:3].min() > 0.5  # written by layer 0, taken out by layer 2
    assert release[0, 3:].max() < release[0, 0] + 0.02 < 0.2
    assert table.released_layer[0] == 1
    # What nothing takes out stays; more of it than of what the others' tags added was in the stream before.
    assert (release[1:, -1].numpy() > 1.5 * table.before[1:].to_numpy()).all()


def test_an_interrupted_trace_goes_on_to_the_same_bytes(strong, tmp_path):
    model, ids = open_model(strong("bloom")), some_ids()

    stops = [("reading output weights", 1), *(("tracing sinks", done) for done in (0, 2, 4))]
    stops += [("projecting tags", 0), ("projecting tags", 1), ("making tables", 0)]
    whole = trace_sinks(model, ids, tmp_path / "whole", batch=2)
    for number, stop_at in enumerate(stops):
        seen: list[tuple[str, int]] = []

        def stop(what: str, done: int, total: int, seen=seen, stop_at=stop_at) -> None:
            seen.append((what, done))
            if (what, done) == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            trace_sinks(model, ids, tmp_path / "parts", batch=2, show_progress=stop)
        assert not (tmp_path / "parts").exists()
        assert number == 0 or seen[0] == stops[number - 1]
    trace_sinks(model, ids, tmp_path / "parts", batch=2)
    same_bytes(tmp_path / "whole", tmp_path / "parts")
    loaded = Run.load(tmp_path / "parts")
    pd.testing.assert_frame_equal(loaded.traces, whole.traces)
    pd.testing.assert_frame_equal(loaded.heads, whole.heads)


def test_what_is_kept_grows_with_sinks_and_not_with_contexts(planted_run, tmp_path):
    """Oracle: the size of the progress on disk; only where a sink stands is kept of each context, in five numbers."""
    sizes = []
    for count in (2, 8):

        def stop(what: str, done: int, total: int, count: int = count) -> None:
            if what == "tracing sinks" and done == count:
                raise KeyboardInterrupt

        out = tmp_path / str(count)
        with pytest.raises(KeyboardInterrupt):
            planted_run("gpt2", planted.contexts(9), out=out, batch=1, show_progress=stop)
        sizes.append((tmp_path / f"{count}.partial" / "trace.safetensors").stat().st_size)
    places = planted_run("gpt2", planted.contexts(9)).arrays["sink_places"]
    of_six = 40 * len(places) * 6 / 9
    assert abs(sizes[1] - sizes[0] - of_six) < 0.1 * of_six + 16  # the notes' digits


def test_no_sink_gives_empty_tables_like_others(checkpoint, strong, tmp_path):
    full = trace_sinks(open_model(strong("gpt2")), some_ids())
    run = trace_sinks(open_model(checkpoint("gpt2")), some_ids(2), tmp_path / "run")
    for table in ("traces", "heads"):
        empty = getattr(run, table)
        assert len(empty) == 0 < len(getattr(full, table))
        assert empty.dtypes.to_dict() == getattr(full, table).dtypes.to_dict()
        pd.testing.assert_frame_equal(getattr(Run.load(tmp_path / "run"), table), empty)

    def without_rows(one: Run) -> dict[str, Any]:
        rows = {name: int(name.endswith(".without")) for name in one.arrays}
        return {
            name: (t.dtype, t.shape[: rows[name]], t.shape[rows[name] + 1 :])
            for name, t in one.arrays.items()
        }

    assert without_rows(run) == without_rows(full)


def test_one_context_as_a_row_or_a_vector(strong):
    model, ids = open_model(strong("bloom")), some_ids(1)
    assert trace_sinks(model, ids[0]).traces.equals(trace_sinks(model, ids).traces)
    assert trace_sinks(model, ids.int()).traces.equals(trace_sinks(model, ids).traces)
    assert trace_sinks(model, ids).traces.tag_se.isna().all()  # one context says nothing of its scatter


def test_hidden_states_that_are_no_numbers_are_refused_in_one_line(checkpoint):
    model = open_model(checkpoint("gpt2"))
    model.hf.transformer.h[1].mlp.c_fc.weight.data[0, 0] = math.nan
    with pytest.raises(WorkError, match="NaN") as error:
        trace_sinks(model, some_ids(2))
    assert "\n" not in str(error.value)
