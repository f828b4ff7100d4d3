"""tools/wgmma_hazards.py on SASS that ptxas made: the loop that gave wrong sums on the H200, and its repair."""

from __future__ import annotations

import pytest

from tools.wgmma_hazards import crossings, hazards

# experts prefill, 8 warps, before the repair (Triton 3.6.0, sm_90a): all products and waits, some of the rest
WRONG = """
	code for sm_90a
		Function : prefill
	.headerflags	@"EF_CUDA_SM90"
        /*0830*/                   UIADD3 UR11, UR15, -0x2, URZ ;
        /*0910*/                   IMAD.U32 R61, RZ, RZ, UR5 ;
        /*0a00*/                   LEA R56, P3, R57, R14, 0x2 ;
        /*0ad0*/                   ULEA UR12, UR11, UR9, 0xd ;
        /*0c30*/                   LDS R58, [R58+0xc000] ;
        /*0ef0*/                   LOP3.LUT R67, R21, 0x80808080, R8, 0xf8, !PT ;
        /*0f10*/                   PRMT R69, R71, 0x1404, RZ ;
        /*1000*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*1010*/                   WARPGROUP.ARRIVE ;
        /*1020*/                   HGMMA.64x64x16.F32 R24, R68, gdesc[UR8], R24 ;
        /*1090*/                   HGMMA.64x64x16.F32 R24, R60, gdesc[UR20], R24, gsb0 ;
        /*10c0*/                   WARPGROUP.ARRIVE ;
        /*10d0*/                   HGMMA.64x64x16.F32 R24, R64, gdesc[UR20], R24 ;
        /*10e0*/                   HGMMA.64x64x16.F32 R24, R56, gdesc[UR8], R24, gsb0 ;
        /*10f0*/               @P2 BRA 0x830 ;
        /*1110*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*19b0*/                   LEA.HI R19, R56, R56, RZ, 0x1 ;
        /*43b0*/                   EXIT ;
        /*43c0*/                   BRA 0x43c0;
"""
# the kernel after it: the wait stands in front of the jump (7670 is the write of 0910 above, put here by hand)
RIGHT = """
	code for sm_90a
		Function : prefill
        /*7670*/                   IMAD.U32 R61, RZ, RZ, UR5 ;
        /*7680*/                   DEPBAR.LE SB0, 0x2 ;
        /*76f0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*7c70*/                   WARPGROUP.ARRIVE ;
        /*7cb0*/                   HGMMA.64x64x16.F32 R24, R56, gdesc[UR4], R24 ;
        /*7ec0*/                   HGMMA.64x64x16.F32 R24, R60, gdesc[UR16], R24, gsb0 ;
        /*7ef0*/                   WARPGROUP.ARRIVE ;
        /*7f00*/                   HGMMA.64x64x16.F32 R24, R64, gdesc[UR16], R24 ;
        /*7f10*/                   HGMMA.64x64x16.F32 R24, R68, gdesc[UR4], R24, gsb0 ;
        /*7f20*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*7f30*/               @P2 BRA 0x7670 ;
        /*7f40*/                   DEPBAR.LE SB0, 0x0 ;
        /*b090*/                   EXIT ;
"""
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"


def pairs(sass: str) -> list[tuple[str, str]]:
    """(address of the write, address of the product) of each hazard."""
    return [(line.split()[1][:-1], line.split()[-1]) for line in hazards(sass)]


def test_the_loop_that_gave_wrong_sums() -> None:
    assert pairs(WRONG) == [
        ("0910", "1090"), ("0a00", "10e0"), ("0c30", "10e0"), ("0ef0", "10d0"), ("0f10", "1020"),
    ]  # fmt: skip
    assert crossings(WRONG) == 1
    assert hazards(WRONG)[0] == "prefill 0910: IMAD.U32 R61, RZ, RZ, UR5 writes R61, read by wgmma 1090"


def test_the_repaired_loop() -> None:
    assert hazards(RIGHT) == [] and crossings(RIGHT) == 0


def test_a_wait_leaves_the_latest_groups() -> None:
    """A wait for all but one group frees the registers of the first (R56, R60), not of the second (R64, R68)."""
    one = RIGHT.replace(WAIT, WAIT.replace("0x0", "0x1"))
    assert hazards(one) == [] and crossings(one) == 1
    assert pairs(one.replace("IMAD.U32 R61", "IMAD.U32 R65")) == [("7670", "7f00")]
    assert pairs(RIGHT.replace(WAIT, WAIT.replace("0x0", "0x2"))) == [("7670", "7ec0")]


def test_a_wait_that_may_not_run_is_none() -> None:
    assert pairs(RIGHT.replace(WAIT, "NOP ;")) == [("7670", "7ec0")]
    assert pairs(RIGHT.replace("     " + WAIT, "@P1  " + WAIT)) == [("7670", "7ec0")]


@pytest.mark.parametrize("end", ["BPT.TRAP 0x1", "EXIT", "BRA 0x7f40"])
def test_paths_that_never_reach_the_loop_again(end: str) -> None:
    assert hazards(RIGHT.replace(WAIT, f"{end} ;")) == []


@pytest.mark.parametrize(
    ("instruction", "writes"),
    [
        ("LDS.128 R60, [R2]", False), ("LDS.128 R61, [R2]", True), ("LDS.64 R59, [R2]", False),
        ("LDSM.16.M88.4 R58, [R2]", False), ("LDSM.16.M88.4 R68, [R2]", True), ("IMAD.WIDE R66, R2, R3, R4", True),
        ("CS2R R70, SRZ", True), ("SHFL.BFLY PT, R64, R8, 0x10, 0x1f", True), ("STS.128 [R64], R64", False),
        ("ISETP.NE.AND P1, PT, R64, RZ, PT", False), ("F2FP.BF16.F32.PACK_AB R71, R3, R2", True),
        ("FADD R2, R64, R68", False), ("IADD3 R67, P0, R2, R3, RZ", True),
        ("LDGSTS.E.128 [R64], desc[UR4][R68.64]", False),
    ],
)  # fmt: skip
def test_what_an_instruction_writes(instruction: str, writes: bool) -> None:
    """In front of the wait for the second group, whose A is R64 to R71 (that of the first, R56 to R63, is free)."""
    wait = WAIT.replace("0x0", "0x1")
    sass = RIGHT.replace(WAIT, f"{wait}\n        /*7f28*/   {instruction} ;\n        /*7f2c*/   {WAIT}")
    assert bool(hazards(sass)) == writes
