"""Import circles within a package, which the contracts of import-linter do not find."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_no_circles_between_files_of_the_library() -> None:
    """No files of emulated_kernel import each other in a circle, including imports for type checking and
    imports within functions.
    """
    graph = grimp.build_graph("emulated_kernel", cache_dir=None)
    TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    ).prepare()
