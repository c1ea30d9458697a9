"""The tuned tables in force, in one word: parts of a measurement must launch the same kernels."""

from pathlib import Path

from harness.project import fingerprint, tuned_tables
from harness.project.source_tree import NETWORK, sources
from harness.results import schema

REMEDY = (
    f"tune again (python -m harness.tune), remove it, or set {tuned_tables.VARIABLE}= for no table"
)


def digest(root: Path, family: str) -> str:
    """The SHA-256 of what the tables in force hold for the kernels of a family.

    The kernel files are those that the file of the family imports; all are, for a network. The
    digest is the same wherever no table binds. Raises UserError where a table is broken.
    """
    whole = (root / f"{NETWORK}/{family}.py").is_file()
    files = [Path(name).parts for name in sources(root, f"kernels/{family}.py")]
    stems = {
        parts[1].removesuffix(".py").removesuffix("_details")
        for parts in files
        if parts[0] == "kernels"
    }
    found = {}
    for path in tuned_tables.in_force(root / "kernels/tuned"):
        held = schema.read(path, "tuned", REMEDY)["families"]
        if mine := {name: record for name, record in held.items() if whole or name in stems}:
            found[path.name] = mine
    return fingerprint.of(found)
