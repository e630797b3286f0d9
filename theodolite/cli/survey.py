"""`theodolite survey`: a model measured on a text."""

from __future__ import annotations

from theodolite.cli.options import (
    DEFAULT_CONTEXTS,
    Actors,
    AsJson,
    Batch,
    Contexts,
    CorpusSpec,
    Device,
    DeviceMap,
    Dtype,
    Length,
    Model,
    Ray,
    Revision,
    RunFolder,
    Seed,
    TextColumnName,
    default_folder,
    finish,
    opened_model,
    read_corpus,
    refuse_unread,
)
from theodolite.cli.screen import bars, one_line_errors, say_stopping, screen
from theodolite.system.allocator import keep_pages
from theodolite.system.interrupt import interruptible


def survey_command(
    model: Model = None,
    corpus: CorpusSpec = None,
    length: Length = None,
    contexts: Contexts = DEFAULT_CONTEXTS,
    seed: Seed = 0,
    out: RunFolder = None,
    as_json: AsJson = False,
    batch: Batch = None,
    text_column: TextColumnName = "text",
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    revision: Revision = None,
    ray: Ray = None,
    actors: Actors = None,
) -> None:
    """Measure a model on a text: tables, arrays and a report.

    Example: theodolite survey gpt2 --corpus notes.txt --length 256 --out runs/gpt2
    """
    with one_line_errors(), interruptible(say_stopping) as stopped:
        from theodolite.report.page import write_report

        keep_pages()
        if ray is None:
            refuse_unread("without --ray there are no workers", {"--actors": actors})
        else:
            refuse_unread(
                "--ray: each worker has one device", {"--device": device, "--device-map": device_map}
            )
        opened = opened_model(model, dtype, device if ray is None else "cpu", device_map, revision)
        read = read_corpus(opened, corpus, length, contexts, seed, text_column)
        folder = out or default_folder(opened, read)
        with bars(stopped) as show:
            if ray is None:
                from theodolite.passes.survey import survey

                run = survey(opened, read, folder, batch=batch, seed=seed, show_progress=show)
            else:
                from theodolite.passes.ray_survey import survey_on_ray

                run = survey_on_ray(
                    opened,
                    read,
                    folder,
                    address=ray,
                    actors=actors,
                    batch=batch,
                    seed=seed,
                    show_progress=show,
                    say=lambda line: screen.print(line, style="dim", markup=False, highlight=False),
                )
        page = write_report(run, folder / "report")
        finish(run, page, as_json)
