"""Messages of a federated study in plain words, for a data officer: what a file holds, and what it reveals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from m2lgdg.federated.messages import (
    ANSWER,
    JOIN,
    LARGEST,
    REQUEST,
    STUDY,
    read_member_of_any,
    read_message,
    read_study,
)
from m2lgdg.storage import InputError, read_bytes

REVEALS = {  # kind of a sum -> what it is, and what its total reveals
    "codes": "number of subjects with each code of a categorical phenotype",
    "search": "number of subjects below some values, from which the median of a phenotype or a limit of the amplitudes follows",
    "moments": "sum and sum of squares of a phenotype: its mean and spread",
    "usable": "sum of the regional amplitudes, and number of scans that were not standardised: the mean amplitude of each ROI",
    "confounds": "sums of age and sex, and of their products within sites: their spread and correlation",
    "spread": "sums, sums of squares, and products with age and sex, of each feature: means, spreads and slopes",
    "association": "sum of squares of each feature, and sum of its products with the diagnosis, by fold of sites",
    "product": "features times their product with a direction: one step towards the weights of the model",
    "decisions": "sums of decisions of fits without the site, and of their products: their spread",
    "calibration": "log loss of a logistic curve and its two derivatives, over decisions of fits without the site",
}
ABOUT = {
    STUDY: "Settings of a federated study. It holds nothing about subjects.",
    JOIN: "A site joins a study. It holds counts, names of ROIs and phenotypes, and a public key; nothing of single subjects.",
    REQUEST: "Request of the coordinator to all sites. It holds totals over sites and directions computed from them.",
    ANSWER: "Answer of one site. Each array is a sum over all labelled subjects of the site; no row belongs to a subject.",
}


def in_words(path: str | Path) -> Iterator[str]:
    """Lines that describe a file of a federated study."""
    content = read_bytes(path, LARGEST)
    if content[:1] == b"{":
        yield from _json_lines(content, str(path))
        return
    form = next((form for form in (REQUEST, ANSWER) if form.encode() in content[:100_000]), None)
    if form is None:
        raise InputError(f"{path} is not a file of a federated study.")
    head, arrays = read_message(content, form, str(path))
    yield ABOUT[form]
    who = f", site {head.get('site', '')}" if form == ANSWER else ""
    yield f"Study {head.get('study')}, attempt {head.get('attempt')}, round {head.get('round')}{who}, {len(content):,} bytes."
    for name, array in sorted(arrays.items()):
        numbers = array.size // array.shape[-1] if array.dtype == "uint8" else array.size
        yield f"  {name}: {numbers:,} number{'' if numbers == 1 else 's'}{_meaning(name)}"
    if form == ANSWER:
        yield "With masks (see study.json), these numbers look random, and only totals over sites can be read."


def _meaning(name: str) -> str:
    kind = name.partition(".")[0]
    return f" ({REVEALS[kind]})" if kind in REVEALS else ""


def _json_lines(content: bytes, where: str) -> Iterator[str]:
    if STUDY.encode() in content:
        study = read_study(content, where)
        yield ABOUT[STUDY]
        yield f"Study {study.id}; sites: {', '.join(study.sites)}; phenotypes: {', '.join(study.inputs) or 'none'}."
        seen = (
            "on, the coordinator sees totals over sites" if study.masks else "off, the coordinator sees the sums of each site"
        )
        yield f"Masks: {seen}."
        if study.leave_out:
            yield (
                f"Site {study.leave_out} does not train, so that the model can be evaluated there. Totals of studies with and "
                "without a site reveal the sums of that site; joining needs --consent."
            )
        yield f"At least {study.least_subjects} subjects at every site, and {study.least_sites} sites."
        return
    member = read_member_of_any(content, where)
    yield ABOUT[JOIN]
    incomplete, empty = (", ".join(names) or "none" for names in (member.incomplete, member.empty))
    yield f"Site {member.site}: {member.patients} patients, {member.controls} controls."
    yield f"ROIs: {len(member.rois)} ({member.atlas or 'atlas not named'})."
    yield f"Phenotypes with missing values: {incomplete}; without any value: {empty}."
    yield f"Public key {member.key or 'none'}; SHA-256 of the site's cohort {member.hash}."
