from stages.cli import stage_main
from stages.report.config import ReportConfig

raise SystemExit(stage_main("report", ReportConfig, "stages.report.run"))
