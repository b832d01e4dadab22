"""First on the path of a server's processes: adds the faults of `planted_ops` when the registry is imported."""

import importlib.abc
import importlib.util
import sys


class Planting(importlib.abc.MetaPathFinder):
    """Finds the registry as usual, and plants the faults after it has run."""

    def find_spec(self, name, path=None, target=None):  # noqa: ANN001, ANN201 - importlib's signature
        """Handle dsv4_kernels.registry only."""
        if name != "dsv4_kernels.registry":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_plant(module):  # noqa: ANN001, ANN202
            run(module)
            import planted_ops

            planted_ops.plant(module)

        spec.loader.exec_module = run_and_plant
        return spec


sys.meta_path.insert(0, Planting())
