"""`theodolite survey`: a model measured on a text."""

from __future__ import annotations

from dataclasses import replace

from theodolite.cli.options import (
    Actors,
    AsJson,
    Batch,
    Model,
    Opening,
    Ray,
    RunFolder,
    Text,
    default_folder,
    finish,
    refuse_unread,
)
from theodolite.cli.screen import bars, one_line_errors, say_dimly, say_stopping, screen
from theodolite.system.allocator import keep_pages
from theodolite.system.interrupt import interruptible
from theodolite.system.run_folders import check_out


def survey_command(
    *,
    model: Model = None,
    text: Text,
    out: RunFolder = None,
    as_json: AsJson = False,
    batch: Batch = None,
    opening: Opening,
    ray: Ray = None,
    actors: Actors = None,
) -> None:
    """Measure a model on a text: tables, arrays and a report.

    Example: theodolite survey gpt2 --corpus notes.txt --length 256 --out runs/gpt2
    """
    with one_line_errors(), interruptible(say_stopping) as stopped:
        keep_pages()
        if ray is None:
            refuse_unread("without --ray there are no workers", {"--actors": actors})
        else:
            refuse_unread(
                "--ray: each worker has one device",
                {"--device": opening.device, "--device-map": opening.device_map},
            )
            opening = replace(opening, device="cpu")
        opening.check(model)
        text.check()
        check_out(out)

        from theodolite.report.page import write_report

        opened = opening.open(model)
        corpus = text.read(opened)
        folder = out or default_folder(opened, corpus)
        with bars(stopped) as show:
            if ray is None:
                from theodolite.passes.survey import survey

                run = survey(opened, corpus, folder, batch=batch, seed=text.seed, show_progress=show)
            else:
                from theodolite.passes.ray_survey import survey_on_ray

                run = survey_on_ray(
                    opened,
                    corpus,
                    folder,
                    address=ray,
                    actors=actors,
                    batch=batch,
                    seed=text.seed,
                    show_progress=show,
                    say=say_dimly,
                )
        with screen.status("writing the report"):
            page = write_report(run, folder / "report")
        finish(run, page, as_json)
