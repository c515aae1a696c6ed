"""Every diagnostic code with its title and what it means. Codes are stable: never reused."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CODES", "Code", "explain"]


class Code(NamedTuple):
    """A kind of finding."""

    title: str
    explanation: str


CODES: dict[str, Code] = {
    # --- reading the text -------------------------------------------------------------------
    "RHP001": Code(
        "line cannot be read",
        "The line is not a statement of the plan language. The caret stands at the first "
        "character that does not fit, and the message says what may stand there.",
    ),
    "RHP002": Code(
        "unknown version",
        "A plan starts with `plan 1`. A text without that line, or of a version that this "
        "program does not know, is not read any further.",
    ),
    "RHP003": Code(
        "missing statement",
        "`model`, `mesh` and `batch` must each be given once, and so must every key that a "
        "line of their kind takes.",
    ),
    "RHP004": Code(
        "given twice",
        "A line that may appear once (such as `mesh`, `standby` or `reconfigure`), or a key "
        "inside one line, appears a second time.",
    ),
    "RHP005": Code(
        "block not well formed",
        "`stream` and `reconfigure` open a block: `{` ends the line of the head, every line of "
        "the block is one instruction, and `}` stands on a line of its own.",
    ),
    "RHP006": Code(
        "too large",
        "The text, a line, a number or a list exceeds what the reader accepts. The limits keep "
        "a damaged or hostile file from exhausting memory; no real plan comes near them.",
    ),
    # --- ranges and names -------------------------------------------------------------------
    "RHP101": Code(
        "rank out of range",
        "The mesh line fixes the ranks: 0 .. tp*pp*dp - 1. The line names another one.",
    ),
    "RHP102": Code(
        "replica or stage out of range",
        "The line names a replica not below `dp` or a stage not below `pp` of the mesh.",
    ),
    "RHP103": Code(
        "layer out of range",
        "The line names a decoder layer that the model does not have.",
    ),
    "RHP104": Code(
        "micro-batch out of range",
        "Micro-batches of each replica are numbered 0 .. microbatches - 1 of the batch line.",
    ),
    "RHP105": Code(
        "home replica out of range",
        "In `number@replica` the replica must be one of the mesh's logical replicas. It may be "
        "one that has no group left: that is how lost replicas' micro-batches are named.",
    ),
    "RHP106": Code(
        "group defined twice",
        "Each (replica, stage) is held by at most one tensor-parallel group.",
    ),
    "RHP107": Code(
        "stream defined twice",
        "Each (replica, stage) runs exactly one stream; two blocks cover the same one.",
    ),
    "RHP108": Code(
        "impossible sizes",
        "A number of the model, mesh or batch line cannot be: a zero, KV heads that do not "
        "divide the heads, a hidden size that the heads do not divide, or a mesh larger than "
        "the verifier handles.",
    ),
    # --- topology ---------------------------------------------------------------------------
    "RHP201": Code(
        "rank in two places",
        "A rank is a member of one group, or standby, or lost: exactly one of these, once.",
    ),
    "RHP202": Code(
        "rank unaccounted for",
        "Every rank of the mesh must be in a group, standby or lost. A rank that no line names "
        "would wait for ever.",
    ),
    "RHP203": Code(
        "TP degree not possible",
        "The number of ranks of a group is its TP degree. It must be a power of two, at most "
        "the mesh's `tp`, and divide the heads, the KV heads and the FFN size.",
    ),
    "RHP204": Code(
        "stage differs between replicas",
        "All groups of a stage hold the same layers, since they sum their gradients layer by "
        "layer.",
    ),
    "RHP205": Code(
        "layers not covered in order",
        "The stages hold the layers 0 .. layers - 1 in order, each exactly once: no gap, no "
        "overlap.",
    ),
    "RHP206": Code(
        "group without stream",
        "Every group needs a stream that says what it runs.",
    ),
    "RHP207": Code(
        "stream without group",
        "The stream names a (replica, stage) that no ranks hold.",
    ),
    "RHP208": Code(
        "incomplete replica",
        "A replica that has groups must have one for every stage, since activations are passed "
        "inside a replica. A replica with no group at all is fine: others run its "
        "micro-batches.",
    ),
    # --- exactly once -----------------------------------------------------------------------
    "RHP301": Code(
        "micro-batch never computed",
        "Every micro-batch of every logical replica must run F at every stage, at home or on "
        "another replica, or the global batch would lack samples.",
    ),
    "RHP302": Code(
        "computed twice",
        "F, B, W or BW of the same micro-batch appears twice at one stage: its gradient would "
        "be counted twice.",
    ),
    "RHP303": Code(
        "backward missing",
        "After F a micro-batch needs B and W, or BW, on the same replica and stage. Without W "
        "its weight gradient is lost.",
    ),
    "RHP304": Code(
        "fused and split backward mixed",
        "A micro-batch has either BW or B and W at one stage. Having both counts it twice.",
    ),
    "RHP305": Code(
        "compute out of order",
        "At one stage a micro-batch runs F before B, and B before W.",
    ),
    "RHP306": Code(
        "backward away from its forward",
        "B and W need the activations that F left, so they run where F ran.",
    ),
    # --- data flow --------------------------------------------------------------------------
    "RHP401": Code(
        "receive without send",
        "No instruction of the peer sends what is received here: the stream would wait for ever.",
    ),
    "RHP402": Code(
        "send without receive",
        "Nobody receives what is sent here. The message would be taken for the next one.",
    ),
    "RHP403": Code(
        "transfer twice",
        "The same tensor is sent, received, scattered or gathered twice in one stream.",
    ),
    "RHP404": Code(
        "transfer missing",
        "F needs the activation of the previous stage, B and BW need the gradient of the next "
        "stage; nothing sends it and nothing receives it.",
    ),
    "RHP405": Code(
        "used before it is received",
        "The receive (or the gather) stands after the instruction that needs it.",
    ),
    "RHP406": Code(
        "sent before it is computed",
        "The send (or the scatter) stands before the instruction that makes the tensor.",
    ),
    "RHP407": Code(
        "transfer past the end of the pipeline",
        "The first stage has no previous stage (no recv_act, no send_grad) and the last has no "
        "next (no send_act, no recv_grad).",
    ),
    "RHP408": Code(
        "scatter or gather misplaced",
        "A scatter stands between the compute that makes the tensor and its send; a gather "
        "between the receive and the compute that uses it.",
    ),
    "RHP409": Code(
        "ends disagree on chunks",
        "One end of a transfer cuts the tensor into chunks (scatter) and the other expects it "
        "whole, or the other way round (gather).",
    ),
    "RHP410": Code(
        "unequal TP needs scatter and gather",
        "Between groups of different TP degree the sender scatters and the receiver gathers; "
        "a whole tensor per member has no peer to go to.",
    ),
    "RHP411": Code(
        "tokens do not divide into chunks",
        "A chunked transfer cuts the tokens of a micro-batch into max(TP here, TP there) equal "
        "chunks; `tokens` of the batch line must be a multiple of it.",
    ),
    "RHP412": Code(
        "channel order differs",
        "A channel delivers in the order of its sends. If the other end receives in another "
        "order, tensors are swapped silently and the gradients are wrong.",
    ),
    "RHP413": Code(
        "transfer of what is not computed here",
        "The stream sends or receives a tensor of a micro-batch that it does not compute.",
    ),
    "RHP414": Code(
        "micro-batch changes replica",
        "A micro-batch runs all its stages on one replica, since transfers stay inside a replica.",
    ),
    # --- progress ---------------------------------------------------------------------------
    "RHP501": Code(
        "deadlock",
        "Streams wait for each other in a circle. Sends never wait; a receive waits for its "
        "send; reduce_grads waits for all replicas of the stage and step for all streams. The "
        "notes walk the shortest circle link by link.",
    ),
    # --- memory -----------------------------------------------------------------------------
    "RHP601": Code(
        "out of memory",
        "At this line the parameters, optimizer state, live activations and buffers of a "
        "device exceed the capacity of the memory line. The caret is at the peak.",
    ),
    "RHP602": Code(
        "state does not fit",
        "Parameters, gradients and optimizer state of the group's layers alone exceed the "
        "capacity, whatever the schedule.",
    ),
    # --- gradients --------------------------------------------------------------------------
    "RHP701": Code(
        "reduce_grads missing",
        "Every stream sums its weight gradients over the replicas once, after its last W or BW.",
    ),
    "RHP702": Code(
        "step missing",
        "Every stream ends with one step, in which all ranks vote and update together.",
    ),
    "RHP703": Code(
        "reduce_grads or step twice",
        "One iteration reduces once and steps once.",
    ),
    "RHP704": Code(
        "work after reduce_grads",
        "Only step may follow reduce_grads: a weight gradient computed later would be left out "
        "of the sum.",
    ),
    "RHP705": Code(
        "step is not last",
        "step comes after reduce_grads and ends the stream.",
    ),
    # --- adaptation -------------------------------------------------------------------------
    "RHP801": Code(
        "state has no source",
        "A member needs a shard that it did not hold before and that no reshard line brings.",
    ),
    "RHP802": Code(
        "state from two sources",
        "Two reshard lines bring the same layers to the same group.",
    ),
    "RHP803": Code(
        "source does not hold the layers",
        "The source of a reshard line is a group of the previous plan; it must exist there and "
        "hold all layers of the line.",
    ),
    "RHP804": Code(
        "source is lost",
        "The rank that holds the needed shard in the source group is lost.",
    ),
    "RHP805": Code(
        "target does not take the layers",
        "The target of a reshard line is a group of this plan; it must exist and hold all "
        "layers of the line.",
    ),
    "RHP806": Code(
        "needless reshard",
        "The target already holds everything that the line would bring.",
    ),
    "RHP807": Code(
        "lost rank comes back",
        "A rank that was lost in the previous plan must be lost in this one: its state is gone "
        "and it must not be trusted.",
    ),
    "RHP808": Code(
        "another job",
        "A plan follows another only if the model, the mesh and the batch are the same.",
    ),
}


def explain(code: str) -> str | None:
    """Title and explanation of a code as text; None for an unknown code."""
    known = CODES.get(code)
    return None if known is None else f"{code}: {known.title}\n\n{known.explanation}"
