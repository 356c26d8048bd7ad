"""`m2lgdg federate`: train one model at hospitals that keep their subjects, by files that carry sums only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, suggestions, terminal

group = typer.Typer(
    name="federate",
    help="Train one model at sites that keep their subjects: each site sends sums, a coordinator combines them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
StudyFolder = Annotated[Path, typer.Argument(metavar="STUDY", help="Folder of the coordinator.", show_default=False)]
SiteFolder = Annotated[
    Path, typer.Argument(metavar="SITE", help="Folder of a site, written by `federate join`.", show_default=False)
]


@group.command()
def init(
    context: typer.Context,
    folder: StudyFolder,
    site: Annotated[list[str], typer.Option("--site", help="Site that takes part; repeat for each.", show_default=False)],
    inputs: Annotated[str, typer.Option(help="Phenotype columns, comma-separated; 'none' for none.")] = "none",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of the method: field=value; may be repeated.")
    ] = None,
    least_subjects: Annotated[int, typer.Option(help="Least number of labelled subjects at a site.", min=10)] = 10,
    least_sites: Annotated[int, typer.Option(help="Least number of sites.", min=6)] = 6,
    leave_out: Annotated[
        str | None, typer.Option(metavar="SITE", help="Train without this site, so that the model can be evaluated there.")
    ] = None,
) -> None:
    """Coordinator: begin a study."""
    from m2lgdg.federated import exchange
    from m2lgdg.federated.plan import METHOD
    from m2lgdg.study.config import method_fields

    columns = () if inputs == "none" else tuple(column.strip() for column in inputs.split(","))
    fields = method_fields(METHOD, None, changes or [])
    settings = {"least_subjects": least_subjects, "least_sites": least_sites, "leave_out": leave_out or ""}
    settings |= {"inputs": columns, "fields": fields}
    study = exchange.init(folder, site, **settings)
    terminal.say(
        f"Wrote {folder}: study {study.id} with {len(study.sites)} sites. Send {folder / exchange.STUDY} to each of them."
    )
    terminal.say(f"The folder {folder / exchange.PRIVATE} holds the key that signs your requests: never send or share it.")
    if leave_out:
        terminal.say(f"{leave_out} is left out: every site, {leave_out} included, has to agree when it joins, with --consent.")
    agreed = ("--consent",) if leave_out else ()
    own = ("--site", site[0], "--out", suggestions.free(site[0]), *agreed)
    words = ("join", folder / exchange.STUDY, suggestions.Fill("COHORT"), *own)
    suggestions.print_next(context, "federate", *words, without=["--site"])


@group.command()
def join(
    context: typer.Context,
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="study.json of the coordinator.", show_default=False)],
    path: options.Cohort,
    site: Annotated[str, typer.Option("--site", help="Name of this site in the study.", show_default=False)],
    to: Annotated[Path, typer.Option("--out", help="Folder of this site to write; it stays here.", show_default=False)],
    cohort_site: Annotated[str | None, typer.Option(help="Site of the cohort to use, if it has several.")] = None,
    atlas: Annotated[str | None, typer.Option(help="Atlas to use, if the cohort has several (default: the first).")] = None,
    consent: Annotated[bool, typer.Option("--consent", help="Agree to a study that leaves out a site for evaluation.")] = False,
) -> None:
    """Site: join a study with the labelled subjects of a cohort."""
    from m2lgdg.data.readers import read
    from m2lgdg.federated import exchange
    from m2lgdg.federated.messages import study_in_words
    from m2lgdg.storage import need_unused

    terminal.say("By joining, this site agrees to:", *study_in_words(exchange.open_study(study)))
    need_unused(to)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    cohort = options.with_sites(cohort.parcellation(atlas) if atlas else cohort, [cohort_site] if cohort_site else None)
    with terminal.progress("computing features"):
        message = exchange.join(study, cohort, site, to, consent)
    terminal.say(f"Wrote {to}. Send {message} to the coordinator, who puts it into the folder {exchange.JOINS} of the study.")
    terminal.say(f"The folder {to / exchange.PRIVATE} holds the keys and the features of your subjects: never send it.")
    suggestions.print_next(context, "federate", "show", message, without=["--site"])


@group.command()
def step(
    context: typer.Context,
    folder: SiteFolder,
    request: Annotated[
        Path, typer.Argument(metavar="REQUEST", help="Request file, or a folder whose newest is answered.", show_default=False)
    ],
    to: Annotated[Path | None, typer.Option("--to", help="Folder for the answer (default: outbox of the site).")] = None,
    fingerprint: Annotated[
        str, typer.Option(help="Fingerprint of the members that all sites agreed on, for the first answer.", show_default=False)
    ] = "",
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="Agree that the study begins again without this site; may be repeated."),
    ] = None,
) -> None:
    """Site: answer a request with masked sums over the subjects of this site."""
    from m2lgdg.federated import exchange

    answer = exchange.step(folder, request, to, fingerprint, without or ())
    terminal.say(f"Wrote {answer}. Send it to the coordinator, who puts it into the folder {exchange.ANSWERS} of the study.")
    suggestions.print_next(context, "federate", "show", answer)


@group.command()
def combine(
    context: typer.Context,
    folder: StudyFolder,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="Site that left: begin again without it; may be repeated.")
    ] = None,
) -> None:
    """Coordinator: add the answers of a round, and write the next request or the model."""
    from m2lgdg.federated import exchange
    from m2lgdg.federated.messages import fingerprint

    with terminal.progress("combining"):
        progress = exchange.combine(folder, without or ())
    if progress.request is not None:
        if progress.round == 1:
            terminal.say(
                f"Calibration holds out sites in {progress.plan.method.site_folds} folds, as fit --set site_folds=N does."
            )
            terminal.say(f"The sites compare the fingerprint {fingerprint(progress.plan)} by telephone before they answer.")
        terminal.say(f"Wrote {progress.request} (round {progress.round}). Send it to all sites.")
        suggestions.print_next(context, "federate", "step", suggestions.Fill("SITE"), progress.request)
        return
    model = exchange.save_model(folder, progress)
    subjects, sites = progress.plan.subjects, len(progress.plan.members)
    terminal.say(
        f"Wrote {model}: trained on {subjects} subjects at {sites} sites in {progress.round} rounds, with its model card."
    )
    words = (model, suggestions.Fill("NEW_SITE"), "--out", suggestions.free("predictions.csv"))
    suggestions.print_next(context, "predict", *words)


@group.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Any file that is sent in a study.", show_default=False)],
) -> None:
    """Anyone: say in words what a file holds and what it reveals."""
    from m2lgdg.federated.messages import in_words

    terminal.say(*in_words(path))
