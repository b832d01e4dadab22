"""Small kernels in which one thread sends a message to another; the scope of each side is a parameter."""

SCOPES = ["cta", "cluster", "gpu", "sys"]
PLACES = {
    "one CTA": {"threads": 64},
    "one cluster": {"threads": 32, "grid": 2, "cluster": 2},
    "two clusters": {"threads": 32, "grid": 2},
}
REACH = {
    "cta": 1,
    "cluster": 2,
    "gpu": 3,
    "sys": 3,
    "gl": 3,
}  # in how many of PLACES, from the front, the scope includes both threads

# The writing thread and the reading thread are each lane 0 of a warp; %p0 holds in the reader.
ROLES = """and.b32 %r1, %r100, 31; setp.ne.u32 %p1, %r1, 0; @%p1 bra E; mov.u32 %r2, %ctaid.x; add.u32 %r2, %r2, %r102;
setp.ne.u32 %p0, %r2, 0; mov.u32 %r5, 1;"""
# The reader waits for the writer's flag, and reads the data.
MESSAGE = (
    ROLES
    + """@%p0 bra C; mov.u32 %r6, 7; st.global.u32 [%rd100], %r6; PUBLISH bra E;
C: OBSERVE setp.eq.u32 %p3, %r7, 0; @%p3 bra C; ACQUIRE ld.global.u32 %r8, [%rd100]; st.global.u32 [%rd102], %r8; E:"""
)

STORE, LOAD = "st.release.gpu.global.u32 [%rd101], %r5;", "ld.acquire.gpu.global.u32 %r7, [%rd101];"

# CTA 0 writes into TARGET's shared memory and arrives there; a thread of TARGET waits: warp 1 of CTA 0 if TARGET is 0.
ARRIVAL = """mov.u32 %r1, %cluster_ctarank; setp.ne.u32 %p0, %r1, 0; and.b32 %r2, %r100, 31; setp.ne.u32 %p1, %r2, 0;
setp.ne.u32 %p2, %r100, 0; @%p2 bra I; mbarrier.init.shared::cta.b64 [%r103], 1; fence.mbarrier_init.release.cluster;
I: barrier.cluster.arrive; barrier.cluster.wait; @%p1 bra E; setp.ne.u32 %p3, %r102, 0; mov.u32 %r3, TARGET;
mapa.shared::cluster.u32 %r4, %r103, %r3; @%p0 bra R; @%p3 bra R; mov.u32 %r6, 7; st.shared::cluster.u32 [%r4+16], %r6;
ARRIVE bra E;
R: setp.ne.u32 %p4, %r1, %r3; @%p4 bra E; @!%p3 bra E; W: WAIT @!%p5 bra W; ACQUIRE
ld.shared.u32 %r8, [%r103+16]; st.global.u32 [%rd100], %r8; E: barrier.cluster.arrive; barrier.cluster.wait;"""
ARRIVE, WAIT = (
    "mbarrier.arrive.shared::cluster.b64 _, [%r4];",
    "mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r103], 0;",
)


def message(publish: str, observe: str, acquire: str = "") -> str:
    """The body of MESSAGE with these instructions on the two sides."""
    return MESSAGE.replace("PUBLISH", publish).replace("OBSERVE", observe).replace("ACQUIRE", acquire)


def arrival(target: int, arrive: str = ARRIVE, wait: str = WAIT, acquire: str = "") -> str:
    """The body of ARRIVAL with these instructions on the two sides."""
    body = ARRIVAL.replace("ARRIVE", arrive).replace("WAIT", wait).replace("ACQUIRE", acquire)
    return body.replace("TARGET", str(target))
