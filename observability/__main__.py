"""`python -m observability`: writes what is made from declarations, after a change of one."""

from observability import dashboard, reference

for made in (dashboard, reference):
    made.FILE.write_text(made.text(), encoding="utf-8")
