"""Pictures of a plan over time: as SVG, as a Chrome trace and as JSON.

All are made of one `Scene` (`resihp.ir.drawing.scene`), which takes neutral data: a plan, the
lanes of its groups, when their instructions run, and what memory they need.
"""
