"""`python -m grafana`: writes what is made from declarations, after a change of one."""

from grafana import dashboard, reference

for made in (dashboard, reference):
    made.FILE.write_text(made.text(), encoding="utf-8")
