"""Areas of tracefs that the differential test covers, by name."""

from __future__ import annotations

from stress.differential.areas import (
    definitions,
    eprobes,
    filters,
    formats,
    functions,
    histograms,
    instances,
    lists,
    output,
    settings,
    tracers,
    triggers,
    workloads,
)
from stress.differential.steps import Area

AREAS: dict[str, Area] = {
    area.name: area
    for area in (
        definitions.AREA,
        filters.AREA,
        triggers.AREA,
        eprobes.AREA,
        histograms.DEFINED,
        histograms.COUNTED,
        functions.AREA,
        settings.AREA,
        output.AREA,
        instances.AREA,
        lists.AREA,
        formats.AREA,
        workloads.AREA,
        tracers.AREA,
    )
}
