"""First on the path of a server's processes: faults of `planted_ops` come into the registry as soon as it is there."""

import importlib.abc
import importlib.util
import sys


class Planting(importlib.abc.MetaPathFinder):
    """Finds the registry as everybody else does, and plants when it has been run."""

    def find_spec(self, name, path=None, target=None):  # noqa: ANN001, ANN201 - importlib's signature
        """Of dsv4_kernels.registry only."""
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
