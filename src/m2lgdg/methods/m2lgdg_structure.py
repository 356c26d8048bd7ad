"""Tables of brain structure in the framework of `m2lgdg.py`: each table is a further modality beside scan and phenotypes.

`m2lgdg_connectome.py` is built on both classes. Without tables they change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.deep import Batch, DeepMethod, Shape
from m2lgdg.losses import difference_loss, similarity_loss
from m2lgdg.methods import m2lgdg
from m2lgdg.methods.blocks import standardised_block
from m2lgdg.methods.m2lgdg import CrossAttention, mlp
from m2lgdg.methods.tables import CONFOUNDS, NONE, TakesTables, chosen_tables
from m2lgdg.methods.within_sites import balance
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.storage import InputError

PREFIX = "table."  # of their features in a batch, and of what is fitted for them


class Network(m2lgdg.Network):
    """M²LG-DG with any number of modalities: scan, phenotypes and tables, in this order, as far as the method takes them.

    In Eq. 15, the tokens of the first attend to those of all others, and these to its updated tokens; all others share the
    weights of that layer. With scan and phenotypes alone it is the paper's network.
    """

    tables: tuple[str, ...]  # their features in a batch

    def build_fusion(self, shape: Shape, config: Any) -> None:
        self.tables = tuple(sorted(name for name in shape.fitted if name.startswith(PREFIX)))
        if not self.tables:
            super().build_fusion(shape, config)
            return
        columns = [int(shape.fitted[name]) for name in self.tables]
        # Linear: hidden layers as those of phenotypes cost a point of AUC (docs/choosing.md).
        self.table_encoders = nn.ModuleList(nn.Linear(each, config.phenotype_width) for each in columns)
        widths = [config.imaging_width] if config.imaging else []
        widths += [config.phenotype_width] * (config.phenotypes + len(self.tables))
        tokens = 2 * len(widths) * config.shared_width  # all tokens of a subject, side by side
        if len(widths) == 1 or not config.decomposition:  # one modality, or ablation C1
            self.project = nn.Linear(sum(widths), config.fused_width)
            return
        width = config.shared_width
        self.shared, self.private = (nn.ModuleList(mlp(each, width, width, 0.0) for each in widths) for _ in range(2))  # psi
        if not config.cross_attention:  # ablation C2
            self.project = nn.Linear(tokens, config.fused_width)
            return
        fusion = [CrossAttention(width, config.fusion_heads, config.dropout) for _ in range(config.fusion_layers)]
        self.fusion = nn.ModuleList(fusion)
        self.gate = mlp(tokens, width, len(widths), 0.0)
        self.output = mlp(tokens, 2 * width, config.fused_width, config.dropout)

    def fuse(self, encoded: tuple[Tensor, ...], batch: Batch) -> dict[str, Tensor]:
        """As the paper's, with `shared` and `private` (subject, modality, shared) in place of its four components."""
        if not self.tables:
            return super().fuse(encoded, batch)
        config = self.config
        h = self.encodings(encoded, batch)
        if len(h) == 1 or not config.decomposition:  # one modality, or C1
            return {"fused": self.project(torch.cat(h, dim=-1))}
        shared, private = (
            torch.stack([psi(one) for psi, one in zip(each, h, strict=True)], dim=-2) for each in (self.shared, self.private)
        )  # Eq. 10, each (subject, modality, shared)
        components = {"shared": shared, "private": private}
        tokens = torch.stack([shared, private], dim=-2)  # Eq. 14, (subject, modality, 2 tokens, shared)
        if not config.cross_attention:  # C2
            return components | {"fused": self.project(tokens.flatten(-3))}
        first, others = (
            tokens[..., 0, :, :],
            tokens[..., 1:, :, :].flatten(-3, -2),
        )  # (subject, 2, shared), (subject, 2 * others, shared)
        for layer in self.fusion:
            first, others = layer(first, others)  # Eq. 15
        flat = torch.cat([first, others], dim=-2).flatten(-2)  # (subject, modality * 2 * shared)
        alpha = torch.softmax(self.gate(flat), dim=-1)  # Eq. 16, (subject, modality)
        weighted = alpha[..., None] * flat.view(*flat.shape[:-1], len(self.shared), -1)  # (subject, modality, 2 * shared)
        return components | {"gate": alpha, "fused": self.output(weighted.flatten(-2))}

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the gate's weights, in their order."""
        known = {"imaging": self.config.imaging, "phenotypes": self.config.phenotypes}
        return (*(name for name, taken in known.items() if taken), *(name.removeprefix(PREFIX) for name in self.tables))

    def encodings(self, encoded: tuple[Tensor, ...], batch: Batch) -> list[Tensor]:
        """h of each modality, (subject, imaging) or (subject, phenotype)."""
        h = [functional.gelu(self.combine(torch.cat(encoded, dim=-1)))] if encoded else []  # Eq. 8
        if self.config.phenotypes:
            h.append(self.phenotype_encoder(batch.phenotypes))  # Eq. 9
        for name, encoder in zip(self.tables, self.table_encoders, strict=True):
            values = functional.dropout(batch[name], cast(Any, self.config).table_dropout, self.training)  # (subject, column)
            h.append(encoder(values))
        return h


class WithTables(TakesTables, DeepMethod):
    """Mixed into the method: fits what is taken out of tables, and gives their features, offsets of sites and flags.

    Values have age, age squared, sex and head size regressed out within sites, as in `connectome-adaptive`, and are in units of
    their sd; 0 is the mean of source. A subject without a table has 0 in all its columns and is decided by what is left.
    """

    tables = cast(Any, NONE)  # fields of the method
    centring, imaging = cast(Any, "site"), True
    _shifts = cast(dict[str, npt.NDArray[np.float64]], {})  # (site, column) of source sites, in training only

    def need_inputs(self, source: Cohort) -> None:
        if not (chosen_tables(self.tables, source) or self.imaging or self.phenotypes):
            raise InputError(f"method {self.name} has nothing to learn from: without scan and phenotypes it needs a table.")

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        notes: list[str] = []
        chosen = chosen_tables(self.tables, source, notes)
        self._shifts = self.fit_tables(chosen, source) if chosen else {}
        try:
            super().learn(source, seed=seed, device=device, progress=progress)
        finally:
            self._shifts = {}
        self.facts_["notes"] += notes

    def fit_tables(self, tables: Mapping[str, list[str]], source: Cohort) -> dict[str, npt.NDArray[np.float64]]:
        """Fit slopes of confounds, means and sds of all columns; returns the distance of each source site from the mean."""
        self.facts_["tables"] = {name: {"columns": columns} for name, columns in tables.items()}
        self.facts_["table_confounds"] = [name for name in source.inputs if name in CONFOUNDS]
        self.state_ |= PhenotypeScaler.fit(source, self.facts_["table_confounds"]).state("tables.scaler")
        shifts = {}
        for table in self.table_blocks():
            known = table.fit_filling(source)
            having = source if known.all() else source.select(known)
            confounds, features = table.confounds(having, self.scaled_confounds(having)), table.features(having)
            weights, units = balance(having), features.std(axis=0)
            fitted = standardised_block(features, having, weights, self.centring == "site", confounds, units=units)
            slopes = np.zeros((0, len(fitted.centre))) if fitted.slopes is None else fitted.slopes
            table.put(slopes=slopes, mean=fitted.centre, scale=fitted.scale)
            self.facts_["tables"][table.name]["subjects"] = int(known.sum())
            shift = np.zeros((len(source.site_names), len(fitted.centre)))  # 0 at a site where nobody has the table
            shift[np.isin(np.unique(source.sites), having.sites)] = fitted.rows.shift
            shifts[f"{PREFIX}{table.name}"] = shift
        return shifts

    def confound_scaler(self) -> PhenotypeScaler:
        """Of the phenotypes that are regressed out."""
        return PhenotypeScaler.restore(tuple(self.facts_["table_confounds"]), self.state_, "tables.scaler")

    def scaled_confounds(self, cohort: Cohort) -> dict[str, npt.NDArray[np.float64]]:
        scaled = self.confound_scaler().transform(cohort)  # (subject, confound)
        return {name: scaled[:, i] for i, name in enumerate(self.facts_["table_confounds"])}

    def table_features(self, cohort: Cohort) -> dict[str, npt.NDArray[np.float32]]:
        """(subject, column) values of each table without confounds."""
        features = {}
        for table in self.table_blocks():
            values = table.cleaned(cohort, self.scaled_confounds(cohort))
            values = np.where(table.present(cohort)[:, None], (values - table["mean"]) / table["scale"], 0.0)
            features[f"{PREFIX}{table.name}"] = values.astype(np.float32)
        return features

    def table_offsets(self, source: Cohort, device: torch.device) -> dict[str, Tensor]:
        """(site, column) distance of each site of source from its mean, by feature."""
        place = np.argsort(np.argsort(source.site_names))  # of each site among the sorted ones
        return {name: torch.from_numpy(shift[place].astype(np.float32)).to(device) for name, shift in self._shifts.items()}

    def table_columns(self) -> dict[str, npt.NDArray[np.int64]]:
        """How many columns each table has, for the network."""
        return {f"{PREFIX}{table.name}": np.array(len(table.columns)) for table in self.table_blocks()}

    def taken(self, source: Cohort) -> list[str]:
        """Without phenotypes, those that are regressed out of tables."""
        if self.phenotypes or not self._shifts:
            return super().taken(source)
        return list(self.facts_["table_confounds"])

    def decomposition_losses(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Eq. 11 and 13 summed over pairs of modalities, Eq. 12 over modalities."""
        if "shared" not in parts:
            return super().decomposition_losses(parts)  # type: ignore[misc]
        config: Any = self
        shared, private = (parts[name].unbind(-2) for name in ("shared", "private"))  # of each modality, (subject, shared)
        similar = torch.stack([similarity_loss(one, other) for one, other in combinations(shared, 2)])
        inner = (parts["shared"].float() * parts["private"].float()).sum(dim=-1)  # (subject, modality)
        different = torch.stack([difference_loss(one, other, config.margin) for one, other in combinations(private, 2)])
        return {
            "similarity": config.decomposition_weight * similar.sum(dim=0),
            "orthogonality": config.decomposition_weight * inner.abs().sum(dim=-1).mean(dim=-1),
            "difference": config.decomposition_weight * different.sum(dim=0),
        }
