from stages.report.config import ReportConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("report", ReportConfig, "stages.report.run"))
