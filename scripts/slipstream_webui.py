"""Slipstream in a WebUI of the Forge family, or in AUTOMATIC1111.

A WebUI runs this file by its path, and puts this extension's folder on `sys.path`, where the names of our folders would
clash with other extensions': so the folder is loaded as one package, and taken from the path again.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load_package():
    """The name of the package whose folder this is, loaded once."""
    for name in ("slipstream", "slipstream_webui"):
        known = sys.modules.get(name)
        if known is None:
            spec = importlib.util.spec_from_file_location(
                name, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
            )
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return name
        if Path(known.__file__ or "").resolve().parent == ROOT:
            return name
    raise ImportError("two other packages have the names slipstream and slipstream_webui in this process")


webui = importlib.import_module(f"{load_package()}.ui.webui")
webui.register(ROOT)
SlipstreamScript = webui.script_class()
