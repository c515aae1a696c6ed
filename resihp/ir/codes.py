"""Every diagnostic code with its title and what it means. Codes are stable: never reused."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CODES", "Code", "explain"]


class Code(NamedTuple):
    """A kind of finding."""

    title: str
    explanation: str
    """What is proved."""
    consequence: str
    """What would happen if such a plan ran."""


CODES: dict[str, Code] = {
    # --- reading the text -------------------------------------------------------------------
    "RHP001": Code(
        "line cannot be read",
        "The line is not a statement of the plan language. The caret stands at the first "
        "character that does not fit, and the message says what may stand there.",
        "A line that is skipped or guessed at would make the plan say something that nobody wrote.",
    ),
    "RHP002": Code(
        "unknown version",
        "The first line names the level and the version: `plan 1`, `schedule 1` or `program 1`. "
        "A text without such a line, or of a version that this program does not know, is not "
        "read any further.",
        "The same words may mean something else in another version; running them on a guess "
        "would train another way without a sign.",
    ),
    "RHP003": Code(
        "missing statement",
        "`model`, `mesh` and `batch` must each be given once, and so must every key that a "
        "line of their kind takes.",
        "Ranks, shapes and micro-batches are all counted from these lines; a default would "
        "silently describe another job.",
    ),
    "RHP004": Code(
        "given twice",
        "A line that may appear once (such as `mesh`, `standby` or `reconfigure`), or a key "
        "inside one line, appears a second time.",
        "Which of the two would count? Taking either one hides a mistake of an edit or of a merge.",
    ),
    "RHP005": Code(
        "block not well formed",
        "`stream`, `reconfigure` and `run` open a block: `{` ends the line of the head, every "
        "line of the block is one instruction, and `}` stands on a line of its own.",
        "Instructions would end up in another stream than the one that they were written for.",
    ),
    "RHP006": Code(
        "too large",
        "The text, a line, a number or a list exceeds what the reader accepts. The limits keep "
        "a damaged or hostile file from exhausting memory; no real plan comes near them.",
        "Without limits a damaged file could take the whole memory of the process that "
        "decides for the job.",
    ),
    "RHP007": Code(
        "not at this level",
        "The first line says what a text may hold: a `schedule` only F, B, W and BW, a `plan` "
        "everything that groups run, a `program` one `rank` and its `run` block.",
        "What is out of place would be dropped when the text is lowered or expanded, and what "
        "runs would not be what was written.",
    ),
    "RHP010": Code(
        "cell cannot be read",
        "A cell of torch's CSV holds one action, stage, kind and micro-batch as in `0F3`, or two "
        "overlapped ones, `(0F7;7B3)OVERLAP_F_B`, and nothing else. UNSHARD, RESHARD and "
        "REDUCE_GRAD take no micro-batch, all others need one.",
        "torch reads a cell from its start and leaves alone what follows, so that `2F0F1` runs "
        "2F0 there and F1 never.",
    ),
    "RHP011": Code(
        "another vocabulary",
        "In CSV files of 2024 B is the gradient of the input and BW the whole backward; today "
        "they are I and B. A file is of one vocabulary: BW, or B and W of the same micro-batch, "
        "mark one of 2024, which is read with `--vocabulary 2024`.",
        "The same letters mean other work: torch reads the BW of such a file as a B without a "
        "micro-batch, and nobody computes the gradients that were meant.",
    ),
    "RHP012": Code(
        "row out of place",
        "A row of torch's CSV is a rank and holds at least one action. A compute file has no "
        "communication, and a REDUCE_GRAD at most after all work of its stage; a file with "
        "communication has no empty cells.",
        "torch counts a blank line as a rank, so that all rows below it would run on other ranks.",
    ),
    "RHP013": Code(
        "stages not one to a row",
        "In torch's CSV each stage is run by one rank, and stages are numbered from 0 without a "
        "gap. Which rank runs which stage is not said anywhere else.",
        "A stage on two ranks has two sets of parameters that go apart; where one is missing "
        "its neighbours wait for ever.",
    ),
    # --- ranges and names -------------------------------------------------------------------
    "RHP101": Code(
        "rank out of range",
        "The mesh line fixes the ranks: 0 .. tp*pp*dp - 1. The line names another one.",
        "No process has this number, so everybody who waits for it would wait for ever.",
    ),
    "RHP102": Code(
        "replica or position out of range",
        "The line names a replica not below `dp` or a position not below `pp` of the mesh.",
        "Nobody is there: no rank would ever do what the line says.",
    ),
    "RHP103": Code(
        "layer out of range",
        "The line names a decoder layer that the model does not have.",
        "There are no parameters to hold, and the layer that was meant would be held by nobody.",
    ),
    "RHP104": Code(
        "micro-batch out of range",
        "Micro-batches of each replica are numbered 0 .. microbatches - 1 of the batch line.",
        "There are no samples for it: the instruction would read past the end of the batch.",
    ),
    "RHP105": Code(
        "home replica out of range",
        "In `number@replica` the replica must be one of the mesh's logical replicas. It may be "
        "one that has no group left: that is how lost replicas' micro-batches are named.",
        "Samples, random numbers and weight in the gradient come from the home, which does "
        "not exist.",
    ),
    "RHP106": Code(
        "group defined twice",
        "At each (replica, position) there is at most one tensor-parallel group.",
        "Two sets of ranks would each believe to be this group, and peers would send to one "
        "of them.",
    ),
    "RHP107": Code(
        "stream defined twice",
        "Each (replica, position) runs exactly one stream; two blocks cover the same one.",
        "The members of the group would run one of two orders; where they choose differently "
        "they hang.",
    ),
    "RHP108": Code(
        "impossible sizes",
        "A number of the model, mesh or batch line cannot be: a zero, KV heads that do not "
        "divide the heads, a hidden size that the heads do not divide, or a mesh larger than "
        "the verifier handles.",
        "Shapes would not divide, and the executor would fail while it builds the model.",
    ),
    "RHP109": Code(
        "stage not here",
        "An instruction belongs to one of the stages whose layers its group holds. Where the "
        "group runs several it names it in brackets, as in `F[2] 3`.",
        "The group would compute with layers that it does not hold, or guess which are meant.",
    ),
    "RHP110": Code(
        "pair that cannot be overlapped",
        "`&` overlaps two of F, B, W and BW that have nothing to do with each other: not the same "
        "micro-batch at the same stage, and neither uses what the other makes.",
        "Both start together, so one of them would read a result that is not there yet.",
    ),
    "RHP111": Code(
        "recomputed stage that is not there",
        "`recompute` names stages of the model in ascending order, each once.",
        "Ranks would not agree on what they keep in memory, and a stage that was meant to keep "
        "little would keep all.",
    ),
    "RHP112": Code(
        "micro-batch kept twice",
        "`keep` of the `resume` line names each micro-batch once.",
        "The line was meant to name another one, which would be redone or lost.",
    ),
    # --- topology ---------------------------------------------------------------------------
    "RHP201": Code(
        "rank in two places",
        "A rank is a member of one group, or standby, or lost: exactly one of these, once.",
        "One process cannot hold two shards; and a rank that is lost or standby does not "
        "answer its peers.",
    ),
    "RHP202": Code(
        "rank unaccounted for",
        "Every rank of the mesh must be in a group, standby or lost. A rank that no line names "
        "would wait for ever.",
        "The rank would start, find no work, and the job would wait at the first common step.",
    ),
    "RHP203": Code(
        "TP degree not possible",
        "The number of ranks of a group is its TP degree. It must be a power of two, at most "
        "the mesh's `tp`, divide the heads and the FFN size, and divide the KV heads or be a "
        "multiple of them.",
        "The projections could not be cut into shards of whole heads.",
    ),
    "RHP204": Code(
        "position differs between replicas",
        "All groups of a position hold the same layers, since they sum their gradients layer by "
        "layer.",
        "Gradients of different layers would be added up, or an all-reduce would wait for a "
        "member that never comes.",
    ),
    "RHP205": Code(
        "layers not covered in order",
        "The stages hold the layers 0 .. layers - 1, each exactly once: no gap, no overlap. A "
        "group of several stages lists them in the order of their layers.",
        "A layer in no stage is left out of the model; a layer in two is applied twice.",
    ),
    "RHP206": Code(
        "group without stream",
        "Every group needs a stream that says what it runs.",
        "Its ranks would do nothing, and their neighbours would wait for activations for ever.",
    ),
    "RHP207": Code(
        "stream without group",
        "The stream names a (replica, position) that has no group.",
        "The work that is written there would never run, though it reads as if it did.",
    ),
    # RHP208 meant a replica without a group for every stage, which is now fine. Not to be reused.
    # --- exactly once -----------------------------------------------------------------------
    "RHP301": Code(
        "micro-batch never computed",
        "Every micro-batch of every logical replica must run F at every stage, at home or on "
        "another replica, or the global batch would lack samples.",
        "Training would go on with a smaller global batch than the job was given, without a sign.",
    ),
    "RHP302": Code(
        "computed twice",
        "F, B, W or BW of the same micro-batch appears twice at one stage: its gradient would "
        "be counted twice.",
        "Its samples would weigh twice in the gradient: the loss looks right, the model is "
        "not the same.",
    ),
    "RHP303": Code(
        "backward missing",
        "After F a micro-batch needs B and W, or BW, on the same replica and stage. Without W "
        "its weight gradient is lost.",
        "Its activations would never be freed and its gradient never counted.",
    ),
    "RHP304": Code(
        "fused and split backward mixed",
        "A micro-batch has either BW or B and W at one stage. Having both counts it twice.",
        "The weight gradient would be added twice.",
    ),
    "RHP305": Code(
        "compute out of order",
        "At one stage a micro-batch runs F before B, and B before W.",
        "The instruction would read a tensor that does not exist yet.",
    ),
    "RHP306": Code(
        "backward away from its forward",
        "B and W need the activations that F left, so they run where F ran.",
        "The other rank has no activations of it, so there is nothing to differentiate.",
    ),
    "RHP307": Code(
        "kept micro-batch runs again",
        "What the `resume` line keeps is done at every stage; no instruction may compute it.",
        "Its gradient would be counted twice.",
    ),
    # --- data flow --------------------------------------------------------------------------
    "RHP401": Code(
        "receive without send",
        "No instruction of the peer sends what is received here: the stream would wait for ever.",
        "The receiver hangs; nothing tells a slow peer from one that will never send.",
    ),
    "RHP402": Code(
        "send without receive",
        "Nobody receives what is sent here. The message would be taken for the next one.",
        "The next receive of this channel takes the wrong tensor, of the right shape: nothing "
        "fails, the gradients are wrong.",
    ),
    "RHP403": Code(
        "transfer twice",
        "The same tensor is sent, received, scattered or gathered twice in one stream.",
        "The second message is taken for that of another micro-batch, or waits for ever.",
    ),
    "RHP404": Code(
        "transfer missing",
        "F needs the activation of the previous stage, B and BW need the gradient of the next "
        "stage; nothing sends it and nothing receives it.",
        "The stage would compute with memory that nobody filled.",
    ),
    "RHP405": Code(
        "used before it is received",
        "The receive (or the gather) stands after the instruction that needs it.",
        "The stage would compute with the memory of a message that is still to come.",
    ),
    "RHP406": Code(
        "sent before it is computed",
        "The send (or the scatter) stands before the instruction that makes the tensor.",
        "The peer would get whatever was in the buffer before.",
    ),
    "RHP407": Code(
        "transfer past the end of the pipeline",
        "The first stage has no previous stage (no recv_act, no send_grad) and the last has no "
        "next (no send_act, no recv_grad).",
        "There is no peer: the first stage starts from tokens, the last one from its loss.",
    ),
    "RHP408": Code(
        "scatter or gather misplaced",
        "A scatter stands between the compute that makes the tensor and its send; a gather "
        "between the receive and the compute that uses it.",
        "Chunks would be sent before they are cut, or used before they are joined.",
    ),
    "RHP409": Code(
        "ends disagree on chunks",
        "One end of a transfer cuts the tensor into chunks (scatter) and the other expects it "
        "whole, or the other way round (gather).",
        "The receiver waits for messages of another number and size than the ones that come.",
    ),
    "RHP410": Code(
        "unequal TP needs scatter and gather",
        "Between groups of different TP degree the sender scatters and the receiver gathers; "
        "a whole tensor per member has no peer to go to.",
        "Members without a partner would send to nobody or wait for nobody.",
    ),
    "RHP411": Code(
        "tokens do not divide into chunks",
        "A chunked transfer cuts the tokens of a micro-batch into max(TP here, TP there) equal "
        "chunks; `tokens` of the batch line must be a multiple of it.",
        "The last chunk would have another shape at each end, and the all-gather would fail "
        "or hang.",
    ),
    "RHP412": Code(
        "channel order differs",
        "A channel is all that one group sends to another: activations and gradients of all "
        "stages. It delivers in the order of its sends. If the other end receives in another "
        "order, tensors are swapped silently and the gradients are wrong.",
        "Shapes agree, so nothing fails: micro-batches get each other's activations or "
        "gradients, and the model learns from garbage.",
    ),
    "RHP413": Code(
        "transfer of what is not computed here",
        "The stream sends or receives a tensor of a micro-batch that it does not compute.",
        "The tensor does not exist on this rank; the peer would be waiting for it elsewhere.",
    ),
    "RHP414": Code(
        "wrong peer",
        "A tensor goes from the group that makes it to the group that uses it. A send or receive "
        "names the replica at the other end, or means its own; here that one does not compute it.",
        "The message goes to ranks that never ask for it, and those that need it wait for ever.",
    ),
    "RHP415": Code(
        "transfer to itself",
        "One group runs both stages of this micro-batch, so the tensor is handed over in place: "
        "nothing sends, receives, scatters or gathers it.",
        "Ranks would send to themselves, which transports refuse or never finish.",
    ),
    "RHP416": Code(
        "used before it is made",
        "Where one group runs neighbouring stages, F of a stage stands before F of the next, and "
        "B or BW of the next before B or BW of the stage.",
        "The stage would read a tensor that does not exist yet.",
    ),
    "RHP417": Code(
        "parameters not gathered",
        "A stream that gathers or frees the parameters of a stage runs each F, B, W and BW of it "
        "between a gather_params and its free_params.",
        "The stage would compute with its own shard alone, or with memory that was given back.",
    ),
    "RHP418": Code(
        "gather and free do not alternate",
        "For each stage gather_params and free_params take turns in a stream: a gather first, a "
        "free last.",
        "Parameters gathered twice or never freed fill the memory; what is not gathered cannot "
        "be freed.",
    ),
    # --- programs ---------------------------------------------------------------------------
    "RHP420": Code(
        "ends of a message disagree",
        "Every message that a program sends is received by its peer with the same chunk of as "
        "many chunks, the same shape and the same element type, as the degrees of both groups "
        "want it.",
        "The receiver takes another part of the tensor than it believes, or bytes that do not "
        "make the shape; at best it hangs.",
    ),
    "RHP421": Code(
        "program missing",
        "Programs that are verified together are those of a whole job: every member of every "
        "group, every stage and every peer, each rank once. (One alone is verified as such.)",
        "The others would wait for a rank that nobody starts, or for one of two.",
    ),
    "RHP422": Code(
        "members of a group differ",
        "All members of a tensor-parallel group run the same instructions in the same order; "
        "only their peers and chunks differ.",
        "F, B, BW, W and gathers need all members at once: where they disagree they hang, or "
        "add up tensors of different micro-batches.",
    ),
    "RHP423": Code(
        "programs of different jobs",
        "The programs of a job have the same `model`, `mesh`, `batch`, `precision` and "
        "`recompute` lines and the same number of stages.",
        "Ranks would disagree on shapes, on the number of micro-batches, or on who their peers "
        "are.",
    ),
    "RHP424": Code(
        "rank line at odds",
        "The `rank` line of a program says which member of which group it is, and which of how "
        "many stages it runs with which layers. These must be possible together, and no other "
        "program may claim the same seat or place the same stage elsewhere.",
        "The rank would hold shards or layers that belong to another one.",
    ),
    "RHP425": Code(
        "not the chunks of this member",
        "A cut tensor has as many chunks as the larger of both TP degrees. Member i of a group "
        "of degree t sends or receives chunks i*N/t .. (i+1)*N/t - 1 of N, in this order; a "
        "tensor that is not cut is one message.",
        "Chunks would cross twice or not at all, and the tensor would be joined in a wrong order.",
    ),
    "RHP426": Code(
        "wrong tensor type",
        "What crosses stages has the tokens of a micro-batch (a chunk its share of them), the "
        "hidden size of the model and elements of the precision: f32, or bf16 under "
        "`precision bf16`.",
        "The receiver would wait for another number of bytes than the one that comes.",
    ),
    # --- progress ---------------------------------------------------------------------------
    "RHP501": Code(
        "deadlock",
        "Streams wait for each other in a circle: what uses a received tensor waits for its "
        "send, an overlapped pair for the inputs of both, reduce_grads for all groups of the "
        "stage, step for all streams, and transfers for each other as the transport says. The "
        "notes walk the shortest circle link by link.",
        "The job hangs with every device busy waiting, until a timeout ends it; restarting it "
        "hangs again at the same place.",
    ),
    # --- memory -----------------------------------------------------------------------------
    "RHP601": Code(
        "out of memory",
        "At this line the parameters, optimizer state, live activations and buffers of a "
        "device exceed the capacity of the memory line. The caret is at the peak.",
        "The device runs out of memory in the first iteration, after the whole job has been "
        "set up.",
    ),
    "RHP602": Code(
        "state does not fit",
        "Parameters, gradients and optimizer state of the group's layers alone exceed the "
        "capacity, whatever the schedule.",
        "The device runs out of memory while it takes over the state; no order of "
        "instructions helps, only fewer layers or a higher TP degree.",
    ),
    # --- gradients --------------------------------------------------------------------------
    "RHP701": Code(
        "reduce_grads missing",
        "Every stream sums the weight gradients of each of its stages over the replicas once, "
        "after the last W or BW of the stage.",
        "Replicas would update with different gradients and drift apart without a sign.",
    ),
    "RHP702": Code(
        "step missing",
        "Every stream ends with one step, in which all ranks vote and update together.",
        "The ranks of this stage would keep old parameters while the others go on, and the "
        "vote would wait for them.",
    ),
    "RHP703": Code(
        "reduce_grads or step twice",
        "One iteration reduces each stage once and steps once.",
        "A gradient that is summed twice is too large by the number of replicas; a second "
        "step would apply stale moments.",
    ),
    "RHP704": Code(
        "work after reduce_grads",
        "reduce_grads ends the work of its stage in the stream: a weight gradient computed later "
        "would be left out of the sum. Work of other stages may follow, and free_params.",
        "Part of the gradient would be lost, and every replica would lose another part.",
    ),
    "RHP705": Code(
        "step is not last",
        "step comes after every reduce_grads and ends the stream.",
        "Parameters would change before all gradients are in.",
    ),
    # --- adaptation -------------------------------------------------------------------------
    "RHP801": Code(
        "state has no source",
        "A member needs a shard that it did not hold before and that no line "
        "of `reconfigure` brings.",
        "The member would train on from parameters that nobody gave it.",
    ),
    "RHP802": Code(
        "state brought twice",
        "Two lines of `reconfigure` bring the same layers from the same source to the same "
        "target. (From different sources they may: each piece comes from the first line that can "
        "give it.)",
        "One of the lines says nothing, so it is not what its author meant.",
    ),
    "RHP803": Code(
        "source does not hold the layers",
        "The source of a `reshard` line is a group of the previous plan, that of a `move` or "
        "`restore` line a rank of such a group; it must exist there and hold all layers of the "
        "line.",
        "The ranks of the source would be asked for parameters that they never had.",
    ),
    "RHP804": Code(
        "source is lost",
        "The ranks that hold the needed shard in the sources of its lines are all lost; or the "
        "rank is that a `restore` line tells to read a snapshot.",
        "The transfer would wait for a process that is gone, and the recovery would need a "
        "recovery.",
    ),
    "RHP805": Code(
        "target does not take the layers",
        "The target of a line of `reconfigure` is a group of this plan, that of `move` a rank of "
        "one; the group must exist and hold all layers of the line.",
        "State would be sent to ranks that have no place for it.",
    ),
    "RHP806": Code(
        "needless line of reconfigure",
        "The target already holds everything that the line would bring, or an earlier line "
        "brings it.",
        "The recovery takes longer than it must, and the line hides what really moves.",
    ),
    "RHP807": Code(
        "lost rank comes back",
        "A rank that was lost in the previous plan must be lost in this one, or a `returned` line "
        "must say that it is back with nothing: its state is gone and must not be trusted. "
        "`returned` names no other ranks.",
        "Its parameters are iterations behind: the run would go on from mixed states.",
    ),
    "RHP808": Code(
        "another job",
        "A plan follows another only if the model, the mesh, the batch and the precision are the "
        "same.",
        "Shards would be cut by other sizes and the global batch would change in the middle "
        "of a run.",
    ),
    "RHP809": Code(
        "move between unlike members",
        "`move` hands the state of one rank on as it is, so both ranks must be the same member of "
        "groups of the same TP degree: the source in the previous plan, the target in this one. "
        "(`reshard` cuts anew.)",
        "The target would hold another member's shard under its own name.",
    ),
    "RHP810": Code(
        "version of another step",
        "`load` reads the saved version of the step at which the plan resumes, as its `resume` "
        "line says.",
        "Some layers would go on from older parameters than the others.",
    ),
    "RHP811": Code(
        "snapshot of a live rank",
        "`restore` brings what a rank held whose process is gone: the rank is `lost` in this "
        "plan, or `returned`, back with nothing.",
        "What the rank itself holds is as new or newer than its snapshot: state would go back "
        "by a step on some ranks alone.",
    ),
    "RHP812": Code(
        "kept gradient is gone",
        "A micro-batch that is kept has its gradient, at each stage, in the ranks of the group "
        "that computed it in the previous plan. All of them must be alive and form the same group "
        "with the same layers. (What the previous plan kept itself lies in one of its groups of "
        "each stage, so one of them must be the same.)",
        "Its share would be missing from the gradient of the global batch.",
    ),
    # --- lint -------------------------------------------------------------------------------
    "RHP901": Code(
        "idle healthy rank",
        "Standby ranks are enough to double the TP degree of a group that has fewer ranks than "
        "the mesh's `tp`; or a group computes nothing.",
        "The job runs slower than its healthy devices allow.",
    ),
    "RHP902": Code(
        "imbalance",
        "A group computes more than 1.25 times the mean of the other groups, counted as units of "
        "F, B and W times layers (the head as layers of as many parameters), divided by the TP "
        "degree; and one micro-batch on another replica, or one layer in the stage next to it, "
        "would help.",
        "The iteration takes as long as the busiest group: the others wait for it.",
    ),
    "RHP903": Code(
        "receive far too early",
        "Under `edge` a receive stands more computes before its use than the group has for two "
        "micro-batches, though the order of its channel does not ask for it.",
        "The buffer is held all the while, and the memory is missing elsewhere; the transfer is "
        "no earlier for it.",
    ),
    "RHP904": Code(
        "receive posted too late",
        "Under `eager` a send holds up its stream until this receive is posted, while the "
        "receiver computes. Posted before that compute, the iteration is shorter.",
        "Devices wait for a receive that could have been posted long before.",
    ),
    "RHP905": Code(
        "exchanged micro-batches",
        "At one stage a replica runs micro-batches of another one, which runs some of the first "
        "one's. The two migrations cancel.",
        "The work of both stays the same, and activations may have to change replicas for it.",
    ),
    "RHP906": Code(
        "cut into one chunk",
        "A tensor between two groups of one rank is scattered and gathered: max(1, 1) is one "
        "chunk. (Between equal degrees above 1 a cut is a choice.)",
        "The tensor is copied twice for nothing.",
    ),
}


def explain(code: str) -> str | None:
    """Title, explanation and consequence of a code as text; None for an unknown code."""
    known = CODES.get(code)
    if known is None:
        return None
    return f"{code}: {known.title}\n\n{known.explanation}\n\n{known.consequence}"
