"""The interactive page: any result as one HTML file that opens from disk and asks nothing of the network."""

from ringspan.page.gantt import describe_timeline
from ringspan.page.html import build_app_page
from ringspan.page.lesson import build_lesson
from ringspan.page.plan import build_plan_page
from ringspan.page.report import build_report
from ringspan.page.simulation import build_settings_page, build_simulation_page
from ringspan.page.traces import build_trace_page, describe_trace, read_trace, timeline_sections

__all__ = [
    "build_app_page",
    "build_lesson",
    "build_plan_page",
    "build_report",
    "build_settings_page",
    "build_simulation_page",
    "build_trace_page",
    "describe_timeline",
    "describe_trace",
    "read_trace",
    "timeline_sections",
]
