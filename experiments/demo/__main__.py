"""``kvjax demo``: find needles in prose under each method."""

from __future__ import annotations

import json
import sys

from experiments.answering import load_model, make_mesh
from experiments.cli import Against, Job
from experiments.demo.play import run_demo
from experiments.demo.report import check_output, table, write
from experiments.demo.settings import DemoOutput, DemoSettings
from experiments.records import with_figures


def _demo(settings: DemoSettings, output: DemoOutput, against: Against) -> None:
    check_output(output)
    output = with_figures(output)
    model = load_model(
        settings.model,
        settings.dtype,
        offline=settings.offline,
        weight_dtype=settings.weight_dtype,
        mesh=make_mesh(settings.mesh),
    )
    result = run_demo(model, settings, progress=not output.quiet)
    if not output.json:
        print(table(result), flush=True)  # before anything is written, so that a full disk does not lose the result
    write(result, output.files)
    written = [str(path) for path in output.files]
    if output.json:
        print(json.dumps({"files": written, "rows": result["metrics"]}))
    else:
        against.show(output.files[0], output.out.name)
    if not output.quiet:
        print("written: " + ", ".join(written), file=sys.stderr)


main = Job(_demo, DemoSettings, DemoOutput, Against, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
